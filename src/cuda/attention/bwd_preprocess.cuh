// The backward's preprocess kernel, the same on every architecture. It computes delta = rowsum(dO o
// O) - dLSE and the LSE in base 2, both padded to whole query tiles, and writes the zeros that
// later kernels rely on: the fp32 sums of dQ, the tile schedulers' counters, and gradient rows
// outside all sequences. Where key tiles store dQ, it writes the zeros of query tiles that no key
// tile visits. A caller that needs delta, for the gradient of sinks, gets it in the LSE's layout.
//
// The LSE of rows that see no key is -inf or, with sinks, their sink. With a sink the LSE is
// finite; P of such rows is 0 because the main kernels mask it.
#pragma once
#include <cstdint>

#include "attention/mask.cuh"
#include "attention/outside_rows.cuh"
#include "attention/problem.h"
#include "core/dtype.cuh"
#include "core/math.cuh"
#include "core/quad.cuh"
#include "core/smem_layout.cuh"
#include "core/unaligned.cuh"
#include "core/vec.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::attention {

// "padded rows": the queries of each sequence, padded to whole tiles.
struct PreprocessArgs {
  BwdProblem problem;
  float* lse_log2;  // [heads_q, padded rows]: lse * log2(e); +inf (P = 0) for empty and padded rows
  float* delta;     // [heads_q, padded rows]
  float* grad_q_sum;      // zeroed, [heads_q, query_tiles, tile_elements]; or null
  int32_t tile_elements;  // fp32 elements of a tile of grad_q_sum
  bool zero_grad_q;       // dQ of tiles that see no key is zeroed here
  int64_t query_tiles;    // per head, over all batches
  bool aligned;           // every row of every tensor starts at a multiple of 16 bytes
  uint32_t* counters;     // of the tile schedulers, kCounters of them, zeroed here; or null
};

inline constexpr int kPreprocessThreads = 256;
inline constexpr int kCounters = 2;     // [0] of key tiles, [1] of query tiles
inline constexpr int kLanesPerRow = 8;  // lanes that compute delta of one row

// Whether no key of the sequence is visible to a query of the tile, so that the main kernel does
// not visit it.
template <int kBlockQ>
__device__ __forceinline__ bool sees_no_key(const Problem& problem, uint32_t batch, int32_t queries,
                                            int32_t first_query) {
  int32_t const keys = problem.keys_in_use(batch).count;
  if (keys == 0) return true;
  Mask const mask{queries, keys, problem.window_left, problem.window_right};
  return first_query >= mask.query_end(keys - 1) || first_query + kBlockQ <= mask.query_begin(0);
}

// Zeros the rows of a tensor from row `first` of a sequence on, at most `count`.
__device__ __forceinline__ void zero_tile(const Tensor& tensor, uint32_t batch, int32_t head,
                                          const Span& span, int32_t first, int32_t count,
                                          int32_t head_dim) {
  int32_t const rows = min(count, span.count - first);
  uint16_t* const to = tensor.data + batch * tensor.batch_stride + head * tensor.head_stride +
                       int64_t{span.first + first} * tensor.seq_stride;
  for (int32_t i = threadIdx.x; i < rows * head_dim; i += blockDim.x) {
    to[i / head_dim * tensor.seq_stride + i % head_dim] = 0;
  }
}

// One block per query tile and head.
template <class Dtype, int kBlockQ>
__global__ void __launch_bounds__(kPreprocessThreads)
    bwd_preprocess_kernel(const __grid_constant__ PreprocessArgs args) {
  const BwdProblem& problem = args.problem;
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  // The next kernel may start now. It may not start before the wait above, because it reads inputs
  // and writes zeros of gradients at once. It executes griddepcontrol.wait before it reads what
  // this kernel writes.
  ptx::griddepcontrol_launch_dependents();
  if (args.counters != nullptr && blockIdx.x == 0 && threadIdx.x < kCounters) {
    args.counters[threadIdx.x] = 0;
  }
  zero_outside_rows(problem.grad_q, problem.queries, problem.batch, problem.heads_q,
                    problem.head_dim);
  zero_outside_rows(problem.grad_k, problem.keys, problem.batch, problem.heads_q / problem.group,
                    problem.head_dim);
  zero_outside_rows(problem.grad_v, problem.keys, problem.batch, problem.heads_q / problem.group,
                    problem.head_dim_v);

  if (args.query_tiles == 0) return;
  int64_t const tile = blockIdx.x % args.query_tiles;
  int32_t const head = static_cast<int32_t>(blockIdx.x / args.query_tiles);
  TileCoordinate const coordinate = problem.queries.find(
      static_cast<uint32_t>(tile), static_cast<uint32_t>(problem.batch), kBlockQ);
  Span const span = problem.queries.span(coordinate.batch);
  if (coordinate.first >= span.count) return;
  int64_t const sequence_tile = problem.queries.first_tile(coordinate.batch, kBlockQ);
  if (args.grad_q_sum != nullptr) {
    float4* const sums = reinterpret_cast<float4*>(
        args.grad_q_sum + (head * args.query_tiles + sequence_tile + coordinate.first / kBlockQ) *
                              args.tile_elements);
    for (int i = threadIdx.x; i < args.tile_elements / 4; i += kPreprocessThreads) {
      sums[i] = {0.f, 0.f, 0.f, 0.f};
    }
  }
  if (args.zero_grad_q &&
      sees_no_key<kBlockQ>(problem, coordinate.batch, span.count, coordinate.first)) {
    zero_tile(problem.grad_q, coordinate.batch, head, span, coordinate.first, kBlockQ,
              problem.head_dim);
  }
  int64_t const padded = (head * args.query_tiles + sequence_tile) * kBlockQ + coordinate.first;
  int64_t const lse_row =
      problem.lse_row(coordinate.batch, static_cast<uint32_t>(head), span.first);
  for (int32_t i = threadIdx.x / kLanesPerRow; i < kBlockQ;
       i += kPreprocessThreads / kLanesPerRow) {
    int32_t const row = coordinate.first + i;
    bool const valid = row < span.count;
    float sum = 0.f;
    if (valid) {
      auto of = [&](const Tensor& tensor) {
        return tensor.data + coordinate.batch * tensor.batch_stride + head * tensor.head_stride +
               int64_t{span.first + row} * tensor.seq_stride;
      };
      const uint16_t* const out = of(problem.out);
      const uint16_t* const grad_out = of(problem.grad_out);
      for (int column = threadIdx.x % kLanesPerRow * kUnitElements; column < problem.head_dim_v;
           column += kLanesPerRow * kUnitElements) {
        auto load = [&](const uint16_t* from) {
          return args.aligned ? *reinterpret_cast<const uint4*>(from + column)
                              : load_unaligned(from + column);
        };
        sum += add_products_of<Dtype>(load(out), load(grad_out), 0.f);
      }
    }
    sum = warp_sum<kLanesPerRow>(sum);
    if (threadIdx.x % kLanesPerRow != 0) continue;
    float const lse = valid ? problem.lse[lse_row + row] : -infinity();
    bool const empty = lse == -infinity();
    if (!empty && problem.grad_lse != nullptr) sum -= problem.grad_lse[lse_row + row];
    args.lse_log2[padded + i] = empty ? infinity() : lse * kLog2E;
    args.delta[padded + i] = empty ? 0.f : sum;
    if (valid && problem.delta_out != nullptr) {
      problem.delta_out[lse_row + row] = empty ? 0.f : sum;
    }
  }
}

}  // namespace flashvar::attention
