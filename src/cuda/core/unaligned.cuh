// Loads and stores of eight 16-bit elements (16 bytes) at addresses that are multiples of two bytes
// only.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashvar {

__device__ __forceinline__ uint4 load_unaligned(const uint16_t* source) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = source[2 * i] | (static_cast<uint32_t>(source[2 * i + 1]) << 16);
  }
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ void store_unaligned(uint16_t* target, uint4 value) {
  uint32_t const words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    target[2 * i] = static_cast<uint16_t>(words[i]);
    target[2 * i + 1] = static_cast<uint16_t>(words[i] >> 16);
  }
}

}  // namespace flashvar
