// Phases of an mbarrier, the bytes it counts, and the parities of a ring that comes round.
#include "probe.h"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"

namespace {

namespace ptx = flashvar::ptx;
using probe::smem_address;

__device__ int passed(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

__device__ void pause() {
  for (int i = 0; i < 100; ++i) __nanosleep(1000);
}

// seen[]: what was found before and after each event, in the order of the comments.
__global__ void phases(const int* data, int* seen) {
  __shared__ uint64_t storage;
  __shared__ __align__(16) int landed[16];
  uint32_t const barrier = smem_address(&storage);
  ptx::mbarrier_init(barrier, 3);
  ptx::mbarrier_init_fence();
  *seen++ = passed(barrier, 1);  // the phase before the first counts as over
  *seen++ = passed(barrier, 0);
  ptx::mbarrier_arrive(barrier);
  ptx::mbarrier_arrive(barrier);
  *seen++ = passed(barrier, 0);  // one arrival is missing
  ptx::mbarrier_arrive(barrier);
  *seen++ = passed(barrier, 0);
  *seen++ = passed(barrier, 1);  // the second phase has begun
  ptx::mbarrier_arrive(barrier);
  ptx::mbarrier_arrive(barrier);
  ptx::mbarrier_arrive_expect(barrier, 64);
  pause();
  *seen++ = passed(barrier, 1);  // all have arrived, no byte has
  ptx::bulk_load(smem_address(landed), data, 48, barrier);
  pause();
  *seen++ = passed(barrier, 1);  // 16 bytes are missing
  ptx::bulk_load(smem_address(landed + 12), data + 12, 16, barrier);
  ptx::mbarrier_wait(barrier, 1);
  *seen++ = passed(barrier, 1);
  for (int i = 0; i < 16; ++i) *seen++ = landed[i];
}

constexpr int kStages = 3;

// Warp 0 fills a ring of kStages buffers, warp 1 copies each to where it came from in `out`.
__global__ void ring(const int* data, int* out, int rounds) {
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ __align__(16) int buffer[kStages][32];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(smem_address(&full[i]), 1);
      ptx::mbarrier_init(smem_address(&empty[i]), 32);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  flashvar::sm90::PipelineState<kStages> at;
  for (int round = 0; round < rounds; ++round, at.advance()) {
    uint32_t const arrived = smem_address(&full[at.stage()]);
    uint32_t const free = smem_address(&empty[at.stage()]);
    if (threadIdx.x == 0) {
      ptx::mbarrier_wait(free, at.phase() ^ 1);
      ptx::mbarrier_arrive_expect(arrived, 128);
      ptx::bulk_load(smem_address(buffer[at.stage()]), data + round * 32, 128, arrived);
    } else if (threadIdx.x >= 32) {
      ptx::mbarrier_wait(arrived, at.phase());
      out[round * 32 + threadIdx.x - 32] = buffer[at.stage()][threadIdx.x - 32];
      ptx::mbarrier_arrive(free);
    }
  }
}

}  // namespace

FLASHVAR_PROBE probe_phases(const int* data, int* seen) {
  return probe::run(phases, 1, 1, 0, data, seen);
}

FLASHVAR_PROBE probe_ring(const int* data, int* out, int rounds) {
  return probe::run(ring, 1, 64, 0, data, out, rounds);
}
