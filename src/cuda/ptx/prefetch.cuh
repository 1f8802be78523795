// Prefetches into the L2 cache.
#pragma once

namespace flashvar::ptx {

__device__ __forceinline__ void prefetch_l2(const void* gmem) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(gmem));
}

}  // namespace flashvar::ptx
