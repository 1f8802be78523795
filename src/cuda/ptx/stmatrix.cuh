// stmatrix: stores 8x8 matrices of 16-bit elements from mma fragments into shared memory (sm_90 and
// newer).
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// Stores four matrices. Lane i passes the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Stores four matrices, each transposed. Lane i passes the address of row i % 8 of matrix i / 8 as
// it lies in shared memory.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t smem, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace flashvar::ptx
