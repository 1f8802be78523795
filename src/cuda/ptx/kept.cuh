// Pins a value to a register: the compiler neither recomputes it at each use nor delays computing
// it until the first. kept() hides from nvcc how the value was computed, by an empty asm; ptxas,
// for which the asm is nothing, may still recompute it. held() gets the value from a shuffle, which
// ptxas does not recompute either.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// The shuffle is from each lane to itself. Called by all lanes of the warp.
__device__ __forceinline__ int32_t held(int32_t value) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(threadIdx.x % 32));
}
template <class Element>
__device__ __forceinline__ Element* held(Element* address) {
  auto const bits = reinterpret_cast<uint64_t>(address);
  uint64_t const low = static_cast<uint32_t>(held(static_cast<int32_t>(bits)));
  uint64_t const high = static_cast<uint32_t>(held(static_cast<int32_t>(bits >> 32)));
  return reinterpret_cast<Element*>(high << 32 | low);
}

__device__ __forceinline__ float kept(float value) {
  asm volatile("" : "+f"(value));
  return value;
}
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace flashvar::ptx
