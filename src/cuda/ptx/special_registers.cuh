// Special registers, read again at every call (volatile). Values derived from threadIdx and
// blockIdx are computed once and kept live across the main loop, in registers that its accumulators
// need.
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
