// Softmax over a row that arrives in blocks (Milakov and Gimelshein, 2018; Dao et al., 2022), in
// base 2: exp(x * scale) = exp2(x * scale_log2), one FFMA and one MUFU per element.
//
// Rows lie as mma m16n8 accumulators hold them: a thread owns kRows rows, a row is spread over the
// four lanes of a quad. The maximum is shared by the quad in every block, the sum only at the end.
#pragma once
#include <cstdint>

namespace flashvar {

inline constexpr float kLn2 = 0.693147180559945309417f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

inline constexpr float kSlack = 8.f;

template <int kRows_>
struct OnlineSoftmax {
  static constexpr int kRows = kRows_;
  float row_max[kRows];
  float row_sum[kRows];  // this thread's share until finish()

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -infinity();
      row_sum[r] = 0.f;
    }
  }

  // Takes in `block_max`, this thread's maximum of row r in the new block. Returns the factor for
  // what was summed up so far, and in `shift` what to subtract in the exponent.
  __device__ __forceinline__ float advance(int r, float block_max, float scale_log2, float& shift) {
    float const before = row_max[r];
    float const highest = fmaxf(before, quad_max(block_max));
    // A maximum that grew little stays in use: weights then reach 2^kSlack instead of 1, and what
    // was summed up need not be multiplied.
    row_max[r] = (highest - before) * scale_log2 <= kSlack ? before : highest;
    // A row that has seen nothing keeps -inf as its maximum; exponents are then taken against 0.
    shift = row_max[r] == -infinity() ? 0.f : row_max[r] * scale_log2;
    // Exactly 1 where the maximum stands: the rounding of a product would drift over many blocks.
    float const factor = before == row_max[r] ? 1.f : exp2_approx(before * scale_log2 - shift);
    row_sum[r] *= factor;
    return factor;
  }

  // Completes row r: returns what the output is multiplied by (1 for rows that saw nothing, whose
  // output is 0) and leaves the natural-log LSE in `lse`.
  __device__ __forceinline__ float finish(int r, float scale_log2, float& lse) {
    float const sum = quad_sum(row_sum[r]);
    bool const empty = sum == 0.f;
    lse = empty ? -infinity() : row_max[r] * scale_log2 * kLn2 + __logf(sum);
    return empty ? 1.f : 1.f / sum;
  }
};

}  // namespace flashvar
