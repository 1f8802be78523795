// movmatrix: transposes an 8x8 matrix of 16-bit elements among the lanes of a warp. Lane i holds
// elements 2 (i % 4) and the next of row i / 4, before and after.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

}  // namespace flashvar::ptx
