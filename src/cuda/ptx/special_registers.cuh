// Reads special registers. The asm is volatile, so each call reads the register again. threadIdx
// and blockIdx would cost registers instead: the compiler computes values derived from them once
// and keeps those across the main loop, whose accumulators need the registers.
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
