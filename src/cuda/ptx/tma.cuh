// TMA loads: copies boxes of a tensor from global to shared memory (sm_90 and newer). Coordinates
// are in elements, innermost dimension first. Elements outside the tensor are written as zeros, and
// their bytes count on the mbarrier.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace flashvar::ptx {

// L2 cache policies in the hardware's encoding (values of CUTLASS, TMA::CacheHintSm90).
enum class CacheHint : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

// Loads complete on the mbarrier `barrier`, whose current phase must expect the bytes of the whole
// box.
__device__ __forceinline__ void tma_load_4d(uint32_t smem, const CUtensorMap* map, uint32_t barrier,
                                            CacheHint hint, int32_t c0, int32_t c1, int32_t c2,
                                            int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(hint)
      : "memory");
}
__device__ __forceinline__ void tma_load_5d(uint32_t smem, const CUtensorMap* map, uint32_t barrier,
                                            CacheHint hint, int32_t c0, int32_t c1, int32_t c2,
                                            int32_t c3, int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(hint)
      : "memory");
}

// Makes this thread's ordinary (generic proxy) writes to shared memory visible to the async proxy,
// through which TMA and wgmma access it.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flashvar::ptx
