// Special registers read anew on every call. What the compiler derives from threadIdx and blockIdx
// it computes once and keeps, which costs a long loop registers that its accumulators need.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

__device__ __forceinline__ uint32_t thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ uint32_t block_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

}  // namespace flashvar::ptx
