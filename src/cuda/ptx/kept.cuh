// Keeps a value in a register: the compiler neither recomputes it at each use nor defers computing
// it.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// ptxas does not recompute it either, as it comes from a shuffle. Called by all lanes of the warp.
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
