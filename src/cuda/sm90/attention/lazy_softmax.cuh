// Online softmax that computes P of a block before the block's maximum is known.
//
// P is computed relative to the running maximum of the previous blocks. While the block's sum of P
// stays below kMaxRowSum, the running maximum is kept and the block's own maximum is never
// computed. Otherwise the running maximum, which is in log2 units, is raised by a whole number (up
// to rounding), and P, the row sum and the output are rescaled by that power of two. Scores are
// recomputed only where P overflowed.
//
// Rows are laid out as in attention/online_softmax.cuh: a thread has elements of kRows rows, and
// the four lanes of a quad share each row.
#pragma once
#include "attention/online_softmax.cuh"
#include "core/math.cuh"
#include "core/quad.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// Largest sum of a thread's P in one row and block. It bounds each element of P, too, as
// 2^kRescaleThreshold does in OnlineSoftmax.
inline constexpr float kMaxRowSum = 256.f;
// P above this counts as overflowed: far below the largest fp32 number (2^128), so that sums of P
// are finite.
inline constexpr float kOverflow = 0x1p100f;

template <int kRows_>
struct LazySoftmax {
  static constexpr int kRows = kRows_;
  float running_max[kRows];  // log2 units; P is relative to it; -inf: no visible key seen yet
  float row_sum[kRows];      // this thread's columns only, until finish()

  __device__ __forceinline__ LazySoftmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      running_max[r] = -infinity();
      row_sum[r] = 0.f;
    }
  }

  // Whether every row of this thread has seen a visible key.
  __device__ __forceinline__ bool has_running_max() const {
    bool all = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) all = all && running_max[r] != -infinity();
    return all;
  }

  // As OnlineSoftmax::advance(): updates the running maximum with `block_max` before P is computed.
  __device__ __forceinline__ float advance(int r, float block_max, float scale_log2, float& shift) {
    float const before = running_max[r];
    float const highest = quad_max(block_max) * scale_log2;
    running_max[r] = highest - before <= kRescaleThreshold ? before : highest;
    shift = running_max[r] == -infinity() ? 0.f : running_max[r];
    float const factor = before == running_max[r] ? 1.f : exp2_approx(before - shift);
    row_sum[r] *= factor;
    return factor;
  }

  // Raises the running maximum of row r after P of the block was computed with the old one.
  // `highest`: the quad's largest P. Returns the factor that rescales P, row sum and output: a
  // power of two, 1 where `highest` is 1.
  __device__ __forceinline__ float raise(int r, float highest) {
    float const before = running_max[r];
    running_max[r] = before + static_cast<float>((__float_as_int(highest) >> 23) - 127);
    float const factor = exp2_approx(before - running_max[r]);
    row_sum[r] *= factor;
    return factor;
  }

  // As OnlineSoftmax::finish(). Does not use scale_log2: running_max is in units of log2 already.
  __device__ __forceinline__ float finish(int r, float, float& lse) {
    float const sum = quad_sum(row_sum[r]);
    bool const empty = sum == 0.f;
    lse = empty ? -infinity() : running_max[r] * kLn2 + __logf(sum);
    return empty ? 1.f : 1.f / sum;
  }
};

}  // namespace flashvar::sm90::attention
