// Bulk copies (cp.async.bulk) to shared memory and back, from many blocks at once.
#include "probe.h"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace {

namespace ptx = flashvar::ptx;
using probe::smem_address;

// Block i stores its `count` values times i + 1 in `out`, in pieces of `piece` values.
__global__ void scale(const float* data, float* out, int count, int piece) {
  extern __shared__ __align__(1024) float shared[];
  __shared__ uint64_t storage;
  uint32_t const smem = smem_address(shared), barrier = smem_address(&storage);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_arrive_expect(barrier, count * 4);
    ptx::bulk_load(smem, data + blockIdx.x * count, count * 4, barrier);
  }
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < count; i += blockDim.x) shared[i] *= blockIdx.x + 1;
  ptx::fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; i += piece) {
      ptx::bulk_store(out + blockIdx.x * count + i, smem + i * 4, piece * 4);
      ptx::bulk_commit();
    }
    ptx::bulk_wait_read();
  }
  __syncthreads();  // what was read may be written again: no copy may see it
  for (int i = threadIdx.x; i < count; i += blockDim.x) shared[i] = 1e30f;
  if (threadIdx.x == 0) ptx::bulk_wait();
}

}  // namespace

FLASHVAR_PROBE probe_scale(const float* data, float* out, int blocks, int count, int piece) {
  return probe::run(scale, blocks, 128, count * 4, data, out, count, piece);
}
