// Counters in global memory by which blocks wait for each other.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// Returns once `*counter` has reached `count`: what was written before it was raised can be read.
// More is as good: sequences whose offsets make no sense may share a counter, and must not hang.
__device__ __forceinline__ void await_count(const uint32_t* counter, uint32_t count) {
  asm volatile(
      "{\n"
      ".reg .pred reached;\n"
      ".reg .u32 found;\n"
      "wait:\n"
      "ld.acquire.gpu.global.u32 found, [%0];\n"
      "setp.ge.u32 reached, found, %1;\n"
      "@reached bra finished;\n"
      "bra wait;\n"
      "finished:\n"
      "}\n" ::"l"(counter),
      "r"(count)
      : "memory");
}

// Raises `*counter` by one, after all that this thread did to memory, and those it met at a
// barrier.
__device__ __forceinline__ void release_count(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace flashvar::ptx
