// Online softmax of rows that arrive in blocks of columns (Milakov and Gimelshein, 2018; Dao et
// al., 2022). In base 2, exp(x * scale) = exp2(x * scale_log2): one FFMA and one MUFU per element.
//
// Rows are laid out as in m16n8 accumulators: a thread has elements of kRows rows, and the four
// lanes of a quad share each row. The quad reduces the row maximum in every block, the row sum only
// at the end.
#pragma once
#include <cstdint>

#include "core/math.cuh"
#include "core/quad.cuh"

namespace flashvar::attention {

// The running maximum is raised only where scores exceed it by more than this, in units of log2: P
// is then at most 2^8, which fp16 and bf16 represent with the same relative precision as values up
// to 1. Measured on an H200: docs/hopper-ledger.md, forward, version 3.
inline constexpr float kRescaleThreshold = 8.f;

// Lower bound of the maximum that exponents are relative to, in units of log2. Down to this bound,
// score * scale_log2 rounds by at most 1. Lower maxima come from masks that add -1e9 or a dtype's
// lowest number. There score * scale_log2 overflows, or rounds by so much that P would be infinite
// in 16 bits, and NaN once it is rescaled by 0. The bound makes P of such scores 0: a row without
// other scores counts as one without a visible key, as with -inf.
inline constexpr float kMinRunningMax = -0x1p24f;

template <int kRows_>
struct OnlineSoftmax {
  static constexpr int kRows = kRows_;
  float row_max[kRows];  // running maximum of the unscaled scores; -inf: no key seen yet
  float row_sum[kRows];  // of P over this thread's columns only, until finish()

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -infinity();
      row_sum[r] = 0.f;
    }
  }

  // Updates the running maximum of row r with `block_max`, this thread's maximum of the new block.
  // Returns the factor that rescales the output so far; row_sum is rescaled here. `shift` is what
  // to subtract from the scaled scores of the new block.
  __device__ __forceinline__ float advance(int r, float block_max, float scale_log2, float& shift) {
    float const old_max = row_max[r];
    float const new_max = fmaxf(old_max, quad_max(block_max));
    // A maximum that is larger by at most kRescaleThreshold is ignored: P then exceeds 1, and the
    // output need not be rescaled.
    row_max[r] = (new_max - old_max) * scale_log2 <= kRescaleThreshold ? old_max : new_max;
    shift = log2_max(row_max[r], scale_log2);
    // Exactly 1 where the maximum is unchanged: a rounded factor would accumulate over many blocks.
    float const factor =
        old_max == row_max[r] ? 1.f : exp2_approx(log2_max(old_max, scale_log2) - shift);
    row_sum[r] *= factor;
    return factor;
  }

  // Completes row r: stores the natural-log LSE in `lse` and returns what to multiply the output by
  // (1 for rows without a visible key, whose output is 0).
  __device__ __forceinline__ float finish(int r, float scale_log2, float& lse) {
    float const sum = quad_sum(row_sum[r]);
    bool const empty = sum == 0.f;
    lse = empty ? -infinity() : log2_max(row_max[r], scale_log2) * kLn2 + __logf(sum);
    return empty ? 1.f : 1.f / sum;
  }

 private:
  // The maximum that exponents are relative to. -inf: the row has seen no visible key yet.
  static __device__ __forceinline__ float log2_max(float highest, float scale_log2) {
    return fmaxf(highest * scale_log2, kMinRunningMax);
  }
};

}  // namespace flashvar::attention
