// Stands for src/cuda/ptx/ldmatrix.cuh.
#pragma once
#include <cstdlib>
#include <cstring>
#include <utility>

#include "device.h"

namespace flashvar::ptx {

inline uint32_t ldmatrix_rows[1024];  // by thread

inline void ldmatrix(uint32_t (&r)[4], uint32_t smem, bool transposed) {
  uint32_t const lane = threadIdx.x % 32, first = threadIdx.x - lane;
  if (smem % 16 != 0) std::abort();
  ldmatrix_rows[threadIdx.x] = smem;
  __syncwarp();
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    uint16_t words[2];
    for (uint32_t e = 0; e < 2; ++e) {
      uint32_t row = lane / 4, column = lane % 4 * 2 + e;
      if (transposed) std::swap(row, column);
      uint32_t const from = ldmatrix_rows[first + matrix * 8 + row] + column * 2;
      std::memcpy(&words[e], shared_memory + from, 2);
    }
    r[matrix] = words[0] | uint32_t{words[1]} << 16;
  }
  __syncwarp();
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) { ldmatrix(r, smem, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) { ldmatrix(r, smem, true); }

}  // namespace flashvar::ptx
