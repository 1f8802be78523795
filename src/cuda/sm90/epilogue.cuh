// Epilogue of wgmma accumulators: stores rows to global memory in 16-bit elements.
#pragma once
#include <cstdint>

#include "core/quad.cuh"

namespace flashvar::sm90 {

// Stores the thread's part of one of its two accumulator rows (`half`: 0 or 1), times `scale`, in
// 16-byte units, for which the lanes of a quad exchange columns. `lane`: of the warp. `exists`:
// whether the row does; all lanes must call this, for the shuffles. `columns`: elements of the row
// in memory; negative where all accumulators lie past its end.
template <class Dtype, int kDim>
__device__ __forceinline__ void store_row(uint16_t* row, const float (&d)[kDim / 2], int half,
                                          float scale, int lane, bool exists, int32_t columns) {
#pragma unroll
  for (int n = 0; n < kDim / 8; n += 4) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The last group may have two tiles only.
      word[i] = n + i < kDim / 8 ? Dtype::pack(d[4 * (n + i) + 2 * half] * scale,
                                               d[4 * (n + i) + 2 * half + 1] * scale)
                                 : 0;
    }
    uint4 const unit = transpose_quad(word);
    int const column = (n + lane % 4) * 8;
    if (exists && column < columns) *reinterpret_cast<uint4*>(row + column) = unit;
  }
}

}  // namespace flashvar::sm90
