// Softmax over a row that arrives in blocks, whose weights need not wait for the block's maximum.
//
// Weights are powers of two relative to a reference, which is a maximum of blocks before. As long
// as a block's weights add up to little against it, the reference stands and no maximum is looked
// for. Else the reference moves by whole powers of two, but for its own rounding, and the weights,
// the sum and the output by the same factor. Only where weights overflowed must the scores be had
// again.
//
// A thread owns kRows rows, spread over the four lanes of a quad, as in core/online_softmax.cuh.
#pragma once
#include "core/online_softmax.cuh"

namespace flashvar::sm90 {

// What a thread's weights of one row and block may add up to: none is larger then.
inline constexpr float kMostWeight = 256.f;
// Weights beyond this count as overflowed.
inline constexpr float kOverflow = 0x1p100f;

template <int kRows_>
struct LazySoftmax {
  static constexpr int kRows = kRows_;
  float reference[kRows];  // log2 of what weights are relative to; -inf: the row has seen nothing
  float row_sum[kRows];    // this thread's share until finish()

  __device__ __forceinline__ LazySoftmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      reference[r] = -infinity();
      row_sum[r] = 0.f;
    }
  }

  // Whether weights can be taken against the references of this thread's rows.
  __device__ __forceinline__ bool has_references() const {
    bool all = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) all = all && reference[r] != -infinity();
    return all;
  }

  // Takes in `block_max`, this thread's maximum of row r in the new block, before its weights.
  // Returns the factor for what was summed up so far, and in `shift` what to subtract in the
  // exponent.
  __device__ __forceinline__ float advance(int r, float block_max, float scale_log2, float& shift) {
    float const before = reference[r];
    float const highest = quad_max(block_max) * scale_log2;
    reference[r] = highest - before <= kSlack ? before : highest;
    shift = reference[r] == -infinity() ? 0.f : reference[r];
    float const factor = before == reference[r] ? 1.f : exp2_approx(before - shift);
    row_sum[r] *= factor;
    return factor;
  }

  // Takes in `highest`, the quad's highest weight of row r in the new block, and returns the factor
  // for the new weights and for what was summed up so far: 1 where it is 1.
  __device__ __forceinline__ float settle(int r, float highest) {
    float const before = reference[r];
    reference[r] = before + static_cast<float>((__float_as_int(highest) >> 23) - 127);
    float const factor = exp2_approx(before - reference[r]);
    row_sum[r] *= factor;
    return factor;
  }

  // As OnlineSoftmax::finish.
  __device__ __forceinline__ float finish(int r, float, float& lse) {
    float const sum = quad_sum(row_sum[r]);
    bool const empty = sum == 0.f;
    lse = empty ? -infinity() : reference[r] * kLn2 + __logf(sum);
    return empty ? 1.f : 1.f / sum;
  }
};

}  // namespace flashvar::sm90
