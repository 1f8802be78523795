// The first kernel of the backward: prepare.cuh with the record of grad_chunk.h.
#pragma once
#include <cstdint>

#include "gated_delta_rule/chain.cuh"
#include "gated_delta_rule/grad_chunk.h"
#include "sm80/gated_delta_rule/prepare.cuh"

namespace flashvar::sm80::gated_delta_rule {

// What stands for a beta of 0, which X is divided by. Columns of the inverse are its multiples.
__device__ __forceinline__ float divisor(float beta) {
  constexpr float kLeast = 1e-20f;
  return fabsf(beta) < kLeast ? kLeast : beta;
}

// The part of K K^T diag(beta) below the diagonal, of the warp's 16 rows.
__device__ __forceinline__ void write_a(const GradRecord&, const Accumulator<16, kChunk>& kk,
                                        const ChunkRows& rows, const HeadRows& head,
                                        const Matrix& a) {
  Lane const at;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row_of(at, half);
    float const factor = rows.norm_k[i];
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      if (!reaches_below(at, half, n)) break;
      int const j = 8 * n + 2 * at.t;
      float2 const norm = pair_of(rows.norm_k, j), beta = pair_of(head.beta, j);
      a.set_pair(i, j, kk.tile[0][n][2 * half] * factor * norm.x * divisor(beta.x),
                 kk.tile[0][n][2 * half + 1] * factor * norm.y * divisor(beta.y));
    }
  }
}

__device__ __forceinline__ void write_vectors(const ChunkRows& rows, const HeadRows& head,
                                              float scale, GradRecord& record) {
  float const last = head.sums[kChunk - 1];
#pragma unroll
  for (int row = static_cast<int>(threadIdx.x) % 32; row < kChunk; row += 32) {
    float const sum = head.sums[row];
    record.a[row] = exp2_approx(sum) * rows.norm_k[row];
    record.b[row] = exp2_approx(last - sum) * rows.norm_k[row];
    record.c[row] = scale * exp2_approx(sum) * rows.norm_q[row];
    record.beta[row] = head.beta[row];
    record.sums[row] = sum;
    record.norm_q[row] = rows.norm_q[row];
    record.norm_k[row] = rows.norm_k[row];
  }
  if (threadIdx.x % 32 == 0) record.decay = exp2_approx(last);
}

// Two elements of X o D in a row; 0 on and above the diagonal.
__device__ __forceinline__ float2 solved_pair(const Matrix& inverse, const HeadRows& head, int i,
                                              int j) {
  float2 const sums = pair_of(head.sums, j), beta = pair_of(head.beta, j), t = inverse.pair(i, j);
  return {j < i ? -t.x / divisor(beta.x) * exp2_approx(head.sums[i] - sums.x) : 0.f,
          j + 1 < i ? -t.y / divisor(beta.y) * exp2_approx(head.sums[i] - sums.y) : 0.f};
}

// What fp16 leaves of X o D, of the warp's 16 rows.
__device__ __forceinline__ void write_low(const Matrix& inverse, const HeadRows& head,
                                          GradRecord& record) {
  Lane const at;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row_of(at, half);
    uint32_t words[kChunk / 8];
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      float2 const x = solved_pair(inverse, head, i, 8 * n + 2 * at.t);
      uint32_t const word = dtype::fp16::pack(x.x, x.y);
      words[n] = dtype::fp16::pack(x.x - dtype::fp16::unpack(static_cast<uint16_t>(word)),
                                   x.y - dtype::fp16::unpack(static_cast<uint16_t>(word >> 16)));
    }
    store_matrix_row(record.inverse_low, at, i, words);
  }
}

// X o D and P, of the warp's 16 rows; what fp16 leaves of the first in careful chunks.
template <class Dtype>
__device__ __forceinline__ void write_matrices(const Accumulator<16, kChunk>& qk,
                                               const Matrix& inverse, float scale,
                                               const ChunkRows& rows, HeadRows& head,
                                               GradRecord& record) {
  Lane const at;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row_of(at, half);
    float const sum = head.sums[i], factor = scale * rows.norm_q[i];
    uint32_t solved[kChunk / 8] = {}, scores[kChunk / 8] = {};
    float total = 0.f;
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      if (!reaches_below(at, half, n)) break;
      int const j = 8 * n + 2 * at.t;
      float2 const sums = pair_of(head.sums, j), beta = pair_of(head.beta, j);
      float2 const norm = pair_of(rows.norm_k, j), x = solved_pair(inverse, head, i, j);
      const float (&tile)[4] = qk.tile[0][n];
      total += fabsf(x.x * beta.x) + fabsf(x.y * beta.y);
      if (fabsf(x.x) > kLargestInverse || fabsf(x.y) > kLargestInverse) total = infinity();
      solved[n] = dtype::fp16::pack(x.x, x.y);
      // Above the diagonal there are no elements: 0, and not a product.
      float const first = tile[2 * half] * (factor * norm.x) * exp2_approx(sum - sums.x);
      float const second = tile[2 * half + 1] * (factor * norm.y) * exp2_approx(sum - sums.y);
      scores[n] = Dtype::pack(j <= i ? first : 0.f, j < i ? second : 0.f);
    }
    total = 1.f + quad_sum(total);
    if (at.t == 0)
      atomicMax(&head.growth, __float_as_int(total));  // positive floats sort as integers
    store_matrix_row(record.inverse, at, i, solved);
    store_matrix_row(record.scores, at, i, scores);
  }
  __syncthreads();  // the growth is known
  if (__int_as_float(head.growth) > kCarefulGrowth) write_low(inverse, head, record);
}

}  // namespace flashvar::sm80::gated_delta_rule
