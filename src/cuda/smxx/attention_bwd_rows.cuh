// What precedes the backward's main kernel on every architecture: D, and the LSE in base 2.
#pragma once
#include <cstdint>

#include "core/dtype.cuh"
#include "core/online_softmax.cuh"
#include "core/problem.h"
#include "core/smem_layout.cuh"
#include "core/unaligned.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::smxx {

// Rows of queries are padded to whole tiles, per sequence.
struct AttentionBwdRowsArguments {
  AttentionBwdProblem problem;
  float* lse_log2;    // [heads_q, padded rows]: lse * log2(e); +inf where a row has no weights
  float* row_sums;    // likewise: D, the sum over the row of dO O, less dLSE
  float* grad_q_sum;  // null: nothing to zero; else [heads_q, query tiles, tile_elements]
  int32_t tile_elements;
  int64_t query_tiles;  // of one head, over all batches
  bool aligned;         // every row of every tensor starts on 16 bytes
  uint32_t* counters;   // kCounters that are set to 0, or null
};

inline constexpr int kRowThreads = 256;
inline constexpr int kCounters = 2;  // of tiles of keys, and of queries
inline constexpr int kRowLanes = 8;  // that share a row

// Zeros the rows of a packed tensor that belong to no sequence, all blocks of the grid together.
__device__ __forceinline__ void clear_outside(const TensorView& tensor, const Sequences& sequences,
                                              int64_t batches, int32_t heads, int32_t head_dim) {
  if (sequences.offsets == nullptr) return;
  int32_t const total = sequences.total;
  int32_t const begin = min(max(sequences.offsets[0], 0), total);
  int32_t const end = min(max(sequences.offsets[batches], begin), total);
  int64_t const outside = int64_t{total - (end - begin)} * heads;
  for (int64_t i = blockIdx.x; i < outside; i += gridDim.x) {
    int64_t const row = i / heads < begin ? i / heads : i / heads - begin + end;
    uint16_t* const to = tensor.data + row * tensor.seq_stride + i % heads * tensor.head_stride;
    for (int column = threadIdx.x; column < head_dim; column += blockDim.x) to[column] = 0;
  }
}

template <class Dtype>
__device__ __forceinline__ float dot(uint4 a, uint4 b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += Dtype::unpack(static_cast<uint16_t>(x[i])) * Dtype::unpack(static_cast<uint16_t>(y[i]));
    sum += Dtype::unpack(static_cast<uint16_t>(x[i] >> 16)) *
           Dtype::unpack(static_cast<uint16_t>(y[i] >> 16));
  }
  return sum;
}

// Writes args.lse_log2 and args.row_sums, a block per query tile and head; their padding gets
// no weights. Rows of gradients outside of all sequences become zeros.
template <class Dtype, int kBlockQ>
__global__ void __launch_bounds__(kRowThreads)
    attention_bwd_rows_kernel(const __grid_constant__ AttentionBwdRowsArguments args) {
  const AttentionBwdProblem& problem = args.problem;
  ptx::release_next_grid();
  if (args.counters != nullptr && blockIdx.x == 0 && threadIdx.x < kCounters) {
    args.counters[threadIdx.x] = 0;
  }
  clear_outside(problem.grad_q, problem.queries, problem.batch, problem.heads_q, problem.head_dim);
  clear_outside(problem.grad_k, problem.keys, problem.batch, problem.heads_q / problem.group,
                problem.head_dim);
  clear_outside(problem.grad_v, problem.keys, problem.batch, problem.heads_q / problem.group,
                problem.head_dim_v);

  if (args.query_tiles == 0) return;
  int64_t const tile = blockIdx.x % args.query_tiles;
  int32_t const head = static_cast<int32_t>(blockIdx.x / args.query_tiles);
  TilePosition const position = problem.queries.find(static_cast<uint32_t>(tile),
                                                     static_cast<uint32_t>(problem.batch), kBlockQ);
  Span const span = problem.queries.span(position.batch);
  if (position.first >= span.count) return;
  int64_t const sequence_tile = problem.queries.first_tile(position.batch, kBlockQ);
  if (args.grad_q_sum != nullptr) {
    float4* const sums = reinterpret_cast<float4*>(
        args.grad_q_sum +
        (head * args.query_tiles + sequence_tile + position.first / kBlockQ) * args.tile_elements);
    for (int i = threadIdx.x; i < args.tile_elements / 4; i += kRowThreads) {
      sums[i] = {0.f, 0.f, 0.f, 0.f};
    }
  }
  int64_t const padded = (head * args.query_tiles + sequence_tile) * kBlockQ + position.first;
  int64_t const lse_row =
      problem.queries.offsets == nullptr
          ? (static_cast<int64_t>(position.batch) * problem.heads_q + head) * problem.queries.seqlen
          : int64_t{head} * problem.queries.total + span.first;
  for (int32_t i = threadIdx.x / kRowLanes; i < kBlockQ; i += kRowThreads / kRowLanes) {
    int32_t const row = position.first + i;
    bool const valid = row < span.count;
    float sum = 0.f;
    if (valid) {
      auto of = [&](const TensorView& tensor) {
        return tensor.data + position.batch * tensor.batch_stride + head * tensor.head_stride +
               int64_t{span.first + row} * tensor.seq_stride;
      };
      const uint16_t* const out = of(problem.out);
      const uint16_t* const grad_out = of(problem.grad_out);
      for (int column = threadIdx.x % kRowLanes * kChunkElements; column < problem.head_dim_v;
           column += kRowLanes * kChunkElements) {
        auto load = [&](const uint16_t* from) {
          return args.aligned ? *reinterpret_cast<const uint4*>(from + column)
                              : load_unaligned(from + column);
        };
        sum += dot<Dtype>(load(out), load(grad_out));
      }
    }
#pragma unroll
    for (int step = 1; step < kRowLanes; step *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (threadIdx.x % kRowLanes != 0) continue;
    float const lse = valid ? problem.lse[lse_row + row] : -infinity();
    bool const empty = lse == -infinity();
    if (!empty && problem.grad_lse != nullptr) sum -= problem.grad_lse[lse_row + row];
    args.lse_log2[padded + i] = empty ? infinity() : lse * (1.f / kLn2);
    args.row_sums[padded + i] = empty ? 0.f : sum;
  }
}

}  // namespace flashvar::smxx
