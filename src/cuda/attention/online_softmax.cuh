// Online softmax of rows that arrive in blocks of columns (Milakov and Gimelshein, 2018; Dao et
// al., 2022), in base 2: exp(x * scale) = exp2(x * scale_log2), one FFMA and one MUFU per element.
//
// Rows are laid out as in m16n8 accumulators: a thread owns kRows rows, each shared by the four
// lanes of a quad. The quad shares the row maximum in every block, the row sum only at the end.
#pragma once
#include <cstdint>

#include "core/math.cuh"
#include "core/quad.cuh"

namespace flashvar::attention {

// log2 of how far scores may exceed the running maximum before it is raised.
inline constexpr float kRescaleThreshold = 8.f;

template <int kRows_>
struct OnlineSoftmax {
  static constexpr int kRows = kRows_;
  float row_max[kRows];
  float row_sum[kRows];  // this thread's columns only, until finish()

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -infinity();
      row_sum[r] = 0.f;
    }
  }

  // Updates the running maximum of row r with `block_max`, this thread's maximum of the new block.
  // Returns the factor that rescales previous sums and outputs; `shift` is what to subtract from
  // the exponents of the new block.
  __device__ __forceinline__ float advance(int r, float block_max, float scale_log2, float& shift) {
    float const old_max = row_max[r];
    float const new_max = fmaxf(old_max, quad_max(block_max));
    // A slightly larger maximum is ignored: P then reaches 2^kRescaleThreshold instead of 1, and
    // the output need not be rescaled.
    row_max[r] = (new_max - old_max) * scale_log2 <= kRescaleThreshold ? old_max : new_max;
    // -inf: the row has seen no key yet. Exponents are then taken relative to 0.
    shift = row_max[r] == -infinity() ? 0.f : row_max[r] * scale_log2;
    // Exactly 1 where the maximum stands: a rounded factor would accumulate over many blocks.
    float const factor = old_max == row_max[r] ? 1.f : exp2_approx(old_max * scale_log2 - shift);
    row_sum[r] *= factor;
    return factor;
  }

  // Completes row r: returns the factor of the output (1 for rows that saw no key, whose output is
  // 0) and stores the natural-log LSE in `lse`.
  __device__ __forceinline__ float finish(int r, float scale_log2, float& lse) {
    float const sum = quad_sum(row_sum[r]);
    bool const empty = sum == 0.f;
    lse = empty ? -infinity() : row_max[r] * scale_log2 * kLn2 + __logf(sum);
    return empty ? 1.f : 1.f / sum;
  }
};

}  // namespace flashvar::attention
