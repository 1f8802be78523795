// Pins a value to a register: the compiler does not recompute it at each use, and does not delay
// computing it until the first use. pin() passes the value through an empty asm statement, which
// hides from nvcc how it was computed; ptxas does not see the statement and may still recompute the
// value. pin_by_shuffle() passes it through a shuffle, which ptxas does not recompute either.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// The shuffle is from each lane to itself. Called by all lanes of the warp.
__device__ __forceinline__ int32_t pin_by_shuffle(int32_t value) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(threadIdx.x % 32));
}
template <class Element>
__device__ __forceinline__ Element* pin_by_shuffle(Element* address) {
  auto const bits = reinterpret_cast<uint64_t>(address);
  uint64_t const low = static_cast<uint32_t>(pin_by_shuffle(static_cast<int32_t>(bits)));
  uint64_t const high = static_cast<uint32_t>(pin_by_shuffle(static_cast<int32_t>(bits >> 32)));
  return reinterpret_cast<Element*>(high << 32 | low);
}

__device__ __forceinline__ float pin(float value) {
  asm volatile("" : "+f"(value));
  return value;
}
__device__ __forceinline__ uint32_t pin(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace flashvar::ptx
