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
// Where sums of the chunk's gates are far apart (`far_gates`), these would overflow: they are 1
// then, and D_ij is computed element by element.
struct HeadVectors {
  float sums[kChunk];           // G, in log2 units; before compute_vectors() the gates themselves
  float minus_beta[kChunk];     // 0 beyond the sequence, as all other rows are
  float rows[kChunk];           // factors of rows of the first matrix, with those of D
  float columns[kChunk];        // likewise of its columns
  float score_rows[kChunk];     // likewise of P, the scores
  float score_columns[kChunk];  // likewise
  int far_gates;
  // Padding: one vector's elements of four heads and eight tokens lie in different banks.
  int unused[7];
};

// Shared memory of the prepare kernel after the tiles.
struct PrepareSmem {
  KeyProducts products;
  float norm_q[kChunk], norm_k[kChunk];  // factors of rows: 1 where they are not normalized
  HeadVectors heads[kHeadsAtOnce];
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
  static __device__ __forceinline__ uint16_t* matrix(ChunkRecord& record) {
    return record.solution;
  }
  static __device__ __forceinline__ float row(float beta) { return -beta; }
  static __device__ __forceinline__ float column(float beta) { return beta; }
  static __device__ __forceinline__ float diagonal(float beta) { return beta; }
  // Contributions of an element of a row, and of the diagonal, to the growth.
  static __device__ __forceinline__ float size(float element, float /* minus_beta */) {
    return fabsf(element);
  }
  static __device__ __forceinline__ float diagonal_size(float beta) { return fabsf(beta); }
  // Writes the vectors that this type of record alone has.
  static __device__ __forceinline__ void write_more(ChunkRecord&, int, float2, float2, float2,
                                                    float2) {}
};

__device__ __forceinline__ float2 pair_of(const float* vector, int first) {
  return *reinterpret_cast<const float2*>(vector + first);
}
__device__ __forceinline__ void put_pair(float* vector, int first, float2 pair) {
  *reinterpret_cast<float2*>(vector + first) = pair;
}

// A thread's share of the gates of a block's heads: two tokens of one head. The next thread has the
// same tokens of the next head, whose gates usually are next in memory.
class ThreadGates {
  static constexpr int kStep = 32 / kHeadsAtOnce;  // tokens that a warp loads at once
  int head, token;
  bool exists[2];
  GateBits bits[2];

 public:
  // `first`: the first head's first token.
  __device__ __forceinline__ ThreadGates(const FwdProblem& problem, const GateCoordinate& first,
                                         int32_t heads, int32_t count)
      : head(static_cast<int>(threadIdx.x % kHeadsAtOnce)),
        token(static_cast<int>(threadIdx.x / 32 * 2 * kStep + threadIdx.x % 32 / kHeadsAtOnce)),
        exists{token < count, token + kStep < count} {
    GateCoordinate const coordinate{first.batch, first.row + (exists[0] ? token : 0),
                                    first.head + min(head, heads - 1)};
    auto load = [&](const Gate& gate, uint32_t GateBits::* field) {
      bits[0].*field = bits[1].*field = 0;
      if (gate.data == nullptr) return;
      int64_t const index = coordinate.index(gate);
      bits[0].*field = load_bits(gate, index);
      bits[1].*field = load_bits(gate, index + (exists[1] ? kStep * gate.seq_stride : 0));
    };
    load(problem.g, &GateBits::g);
    load(problem.beta, &GateBits::beta);
    load(problem.a_log, &GateBits::a_log);
    load(problem.dt_bias, &GateBits::dt_bias);
  }

  // Converts and stores them.
  __device__ __forceinline__ void store(const FwdProblem& problem, HeadVectors* heads) {
    HeadVectors& to = heads[head];
#pragma unroll 1  // the conversions are long code
    for (int i = token; i < token + 2 * kStep; i += kStep) {
      to.sums[i] = exists[0] ? bits[0].decay_log(problem) * kLog2E : 0.f;
      to.minus_beta[i] = exists[0] ? -bits[0].beta_of(problem) : 0.f;
      exists[0] = exists[1];
      bits[0] = bits[1];
    }
  }
};

// Which of a block's heads have far gates, as bits.
__device__ __forceinline__ uint32_t find_far_gates(const PrepareSmem& smem, int32_t heads) {
  int const lane_id = static_cast<int>(threadIdx.x % 32);
  return __ballot_sync(0xffffffffu, lane_id < heads && smem.heads[lane_id].far_gates != 0);
}

// Computes the vectors of a head from its gates, and writes those of the record. By one warp, each
// lane two tokens.
template <class Record>
__device__ __forceinline__ void compute_vectors(const PrepareSmem& smem, HeadVectors& head,
                                                float scale, Record& record) {
  using FirstMatrix = Solution<Record>;
  // Range of D's factors: 2^-60 to 2^60, well inside fp32's.
  constexpr float kFarthest = 60.f;
  int const first = static_cast<int>(threadIdx.x) % 32 * 2;
  float2 const gates = pair_of(head.sums, first), minus_beta = pair_of(head.minus_beta, first);
  float2 const beta = {-minus_beta.x, -minus_beta.y};
  float2 const norm_q = pair_of(smem.norm_q, first), norm_k = pair_of(smem.norm_k, first);
  float const before = exclusive_prefix_sum(gates.x + gates.y);
  float2 const sums = {before + gates.x, before + (gates.x + gates.y)};
  float const last = __shfl_sync(0xffffffffu, sums.y, 31);
  float const middle = 0.5f * (__shfl_sync(0xffffffffu, sums.x, 0) + last);
  bool const near = fabsf(sums.x - middle) <= kFarthest && fabsf(sums.y - middle) <= kFarthest;
  bool const far_gates = !__all_sync(0xffffffffu, near);

  float2 const decay = {exp2_approx(sums.x), exp2_approx(sums.y)};
  put_pair(record.a, first, {decay.x * norm_k.x, decay.y * norm_k.y});
  put_pair(record.b, first,
           {exp2_approx(last - sums.x) * norm_k.x, exp2_approx(last - sums.y) * norm_k.y});
  put_pair(record.c, first, {scale * decay.x * norm_q.x, scale * decay.y * norm_q.y});
  FirstMatrix::write_more(record, first, beta, sums, norm_q, norm_k);

  float2 row_factor = {1.f, 1.f}, column_factor = {1.f, 1.f};
  if (!far_gates) {
    row_factor = {exp2_approx(sums.x - middle), exp2_approx(sums.y - middle)};
    column_factor = {exp2_approx(middle - sums.x), exp2_approx(middle - sums.y)};
  }
  put_pair(head.sums, first, sums);
  put_pair(head.rows, first,
           {FirstMatrix::row(beta.x) * row_factor.x, FirstMatrix::row(beta.y) * row_factor.y});
  put_pair(head.columns, first,
           {FirstMatrix::column(beta.x) * column_factor.x,
            FirstMatrix::column(beta.y) * column_factor.y});
  put_pair(head.score_rows, first,
           {scale * norm_q.x * row_factor.x, scale * norm_q.y * row_factor.y});
  put_pair(head.score_columns, first, {norm_k.x * column_factor.x, norm_k.y * column_factor.y});
  if (first == 0) {
    head.far_gates = far_gates;
    record.decay = exp2_approx(last);
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
