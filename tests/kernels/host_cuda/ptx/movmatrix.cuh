// Stands for src/cuda/ptx/movmatrix.cuh.
#pragma once
#include "device.h"

namespace flashvar::ptx {

inline uint32_t movmatrix_words[1024];  // by thread

inline uint32_t movmatrix_trans(uint32_t word) {
  uint32_t const lane = threadIdx.x % 32;
  const uint32_t* const words = movmatrix_words + (threadIdx.x - lane);
  movmatrix_words[threadIdx.x] = word;
  __syncwarp();
  uint32_t const shift = lane / 4 % 2 * 16, column = lane / 8;
  uint32_t const low = words[lane % 4 * 8 + column] >> shift & 0xffff;
  uint32_t const high = words[lane % 4 * 8 + 4 + column] >> shift & 0xffff;
  __syncwarp();
  return low | high << 16;
}

}  // namespace flashvar::ptx
