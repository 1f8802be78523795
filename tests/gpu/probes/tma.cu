// One box of a tensor of 4 or 5 dimensions, as TMA leaves it in shared memory.
#include "core/tensor_map.h"
#include "probe.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace {

namespace ptx = flashvar::ptx;
using probe::smem_address;

struct Box {
  int rank;
  int at[5];
  uint64_t hint;
  int bytes;
};

// Writes the box and the 1024 bytes after it, all of which were 0xff before.
__global__ void load(const __grid_constant__ CUtensorMap map, Box box, uint32_t* out) {
  extern __shared__ __align__(1024) uint32_t shared[];
  __shared__ uint64_t storage;
  uint32_t const smem = smem_address(shared), barrier = smem_address(&storage);
  for (int i = threadIdx.x; i < (box.bytes + 1024) / 4; i += blockDim.x) shared[i] = 0xffffffff;
  ptx::fence_async_proxy();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(barrier, box.bytes);
    auto const hint = static_cast<ptx::CacheHint>(box.hint);
    const int (&at)[5] = box.at;
    if (box.rank == 4) ptx::tma_load_4d(smem, &map, barrier, hint, at[0], at[1], at[2], at[3]);
    if (box.rank == 5) {
      ptx::tma_load_5d(smem, &map, barrier, hint, at[0], at[1], at[2], at[3], at[4]);
    }
  }
  ptx::mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < (box.bytes + 1024) / 4; i += blockDim.x) out[i] = shared[i];
}

}  // namespace

// 1, cudaErrorInvalidValue, where the driver refuses to encode the map; dimensions innermost first.
FLASHVAR_PROBE probe_tma(int rank, void* data, const uint64_t* dims, const uint64_t* strides,
                         const uint32_t* shape, const int* at, uint64_t hint, uint32_t* out) {
  cudaFree(nullptr);  // the driver encodes in a context
  if (flashvar::tensor_map_encoder() == nullptr) return cudaErrorSymbolNotFound;
  CUtensorMap map;
  cuuint64_t dims_[5], strides_[4];
  Box box{rank, {}, hint, 2};
  for (int i = 0; i < rank; ++i) {
    dims_[i] = dims[i];
    if (i > 0) strides_[i - 1] = strides[i - 1];
    box.at[i] = at[i];
    box.bytes *= static_cast<int>(shape[i]);
  }
  cudaError_t const error = flashvar::encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank,
                                                        data, dims_, strides_, shape);
  return error == cudaSuccess ? probe::run(load, 1, 128, box.bytes + 1024, map, box, out) : error;
}
