// Vectors of a chunk that the prepare kernel computes for each head of v: sums of gates, beta, and
// the factors that they contribute to a record's matrices.
#pragma once
#include <cstdint>

#include "core/quad.cuh"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/gates.cuh"
#include "gated_delta_rule/problem.h"
#include "sm80/gated_delta_rule/inverse.cuh"

namespace flashvar::sm80::gated_delta_rule {

// Heads of v that a block computes at once, one per warp.
inline constexpr int kHeadsAtOnce = 4;

// Vectors of a chunk of one head. D_ij is computed as a product of a factor of i and a factor of j.
// Where the gates of the chunk are `wide`, these would overflow: they are 1 then, and D_ij is
// computed element by element.
struct HeadRows {
  float sums[kChunk];           // G, in log2 units
  float beta[kChunk];           // 0 beyond the sequence, as all other rows are
  float decay[kChunk];          // the factor of D's row
  float columns[kChunk];        // factors of columns of the first matrix, with those of D
  float score_columns[kChunk];  // likewise of P, the scores
  float middle;                 // subtracted from G in D's factors
  int wide;
  int unused[2];
};

// Shared memory of the prepare kernel after the tiles.
struct ChunkRows {
  KeyProducts products;
  float norm_q[kChunk], norm_k[kChunk];  // factors of rows: 1 where they are not normalised
  HeadRows heads[kHeadsAtOnce];
  // Sums of absolute values of the first matrix's rows, within the blocks on the diagonal.
  float totals[kHeadsAtOnce][kChunk];
};

// How a record's first matrix follows from X: each element is X's times a factor of its row and a
// factor of its column.
template <class Record>
struct Solution;

template <>
struct Solution<ChunkRecord> {
  // Growth above which the matrix's low part is written too.
  static constexpr float kCareful = __builtin_huge_valf();
  static constexpr float kLargest = __builtin_huge_valf();
  static __device__ __forceinline__ uint16_t* matrix(ChunkRecord& record) { return record.update; }
  static __device__ __forceinline__ float row(float beta) { return -beta; }
  static __device__ __forceinline__ float column(float beta) { return beta; }
  static __device__ __forceinline__ float diagonal(float beta) { return beta; }
  // What an element of a row, and the diagonal, contribute to the growth.
  static __device__ __forceinline__ float size(float element, float) { return fabsf(element); }
  static __device__ __forceinline__ float diagonal_size(float beta) { return fabsf(beta); }
  // Writes the vectors that this type of record alone has.
  static __device__ __forceinline__ void write_more(ChunkRecord&, int, float, float, float, float) {
  }
};

// The gates of a head's chunk as a lane loads them: of two consecutive tokens.
struct LaneGates {
  bool exists[2];
  GateBits bits[2];

  __device__ __forceinline__ LaneGates(const FwdProblem& problem, const GatePlace& first,
                                       int32_t count) {
    int const token = static_cast<int>(threadIdx.x) % 32 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exists[i] = token + i < count;
      bits[i] =
          GateBits(problem, {first.batch, first.row + (exists[i] ? token + i : 0), first.head});
    }
  }
};

// Computes G and beta of a head, by one warp.
__device__ __forceinline__ void find_gates(const FwdProblem& problem, const LaneGates& gates,
                                           HeadRows& rows) {
  // Range of D's factors: 2^-60 to 2^60.
  constexpr float kFarthest = 60.f;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  float decay[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    decay[i] = gates.exists[i] ? gates.bits[i].decay_log(problem) * (1.f / kLn2) : 0.f;
    beta[i] = gates.exists[i] ? gates.bits[i].beta_of(problem) : 0.f;
  }
  float const before = sum_before(decay[0] + decay[1]);
  float const sums[2] = {before + decay[0], before + (decay[0] + decay[1])};
  float const middle =
      0.5f * (__shfl_sync(0xffffffffu, sums[0], 0) + __shfl_sync(0xffffffffu, sums[1], 31));
  bool const near = fabsf(sums[0] - middle) <= kFarthest && fabsf(sums[1] - middle) <= kFarthest;
  bool const wide = !__all_sync(0xffffffffu, near);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.sums[2 * lane + i] = sums[i];
    rows.beta[2 * lane + i] = beta[i];
  }
  if (lane == 0) {
    rows.middle = middle;
    rows.wide = wide;
  }
}

// The vote tells the compiler that the result is warp-uniform.
__device__ __forceinline__ bool is_wide(const HeadRows& head) {
  return __any_sync(0xffffffffu, head.wide != 0) != 0;
}

// Computes the other vectors of a head and writes those of the record, by one warp.
template <class Record>
__device__ __forceinline__ void find_vectors(const ChunkRows& rows, HeadRows& head, float scale,
                                             Record& record) {
  float const last = head.sums[kChunk - 1];
  bool const wide = head.wide != 0;
#pragma unroll
  for (int row = static_cast<int>(threadIdx.x) % 32; row < kChunk; row += 32) {
    float const sum = head.sums[row], decay = exp2_approx(sum);
    float const norm_q = rows.norm_q[row], norm_k = rows.norm_k[row];
    record.a[row] = decay * norm_k;
    record.b[row] = exp2_approx(last - sum) * norm_k;
    record.c[row] = scale * decay * norm_q;
    Solution<Record>::write_more(record, row, head.beta[row], sum, norm_q, norm_k);
    float const of_column = wide ? 1.f : exp2_approx(head.middle - sum);
    head.decay[row] = wide ? 1.f : exp2_approx(sum - head.middle);
    head.columns[row] = Solution<Record>::column(head.beta[row]) * of_column;
    head.score_columns[row] = norm_k * of_column;
  }
  if (threadIdx.x % 32 == 0) record.decay = exp2_approx(last);
}

__device__ __forceinline__ float2 pair_of(const float* vector, int first) {
  return *reinterpret_cast<const float2*>(vector + first);
}

}  // namespace flashvar::sm80::gated_delta_rule
