// What follows the main kernel: the sums of dQ, rounded into their tensor.
#pragma once
#include <cstdint>

#include "core/problem.h"
#include "ptx/grid_dependency.cuh"
#include "sm90/attention_bwd_consumer.cuh"
#include "sm90/attention_bwd_pipeline.cuh"

namespace flashvar::sm90 {

// One block per tile of queries and head.
template <class Config>
__global__ void __launch_bounds__(256)
    attention_bwd_round_kernel(const __grid_constant__ AttentionBwdArguments arguments) {
  const AttentionBwdProblem& problem = arguments.problem;
  ptx::await_last_grid();
  Sequences queries = problem.queries;
  if constexpr (!Config::kRagged) queries.offsets = nullptr;  // shown to the compiler
  uint32_t const head = blockIdx.x / arguments.query_tiles;
  TilePosition const position = queries.find(blockIdx.x % arguments.query_tiles,
                                             static_cast<uint32_t>(problem.batch), Config::kBlockQ);
  uint32_t const batch = position.batch;
  int32_t const first_row = position.first;
  Span const span = queries.span(batch);
  if (first_row >= span.count) return;
  int64_t tile = blockIdx.x;
  if constexpr (Config::kRagged) {
    tile = int64_t{head} * arguments.query_tiles + queries.first_tile(batch, Config::kBlockQ) +
           first_row / Config::kBlockQ;
  }
  uint32_t const warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const float* const from = arguments.grad_q_sum + tile * Config::kTileElements +
                            int64_t{warpgroup} * Config::kGradQElements;
  const TensorView& tensor = problem.grad_q;
  uint16_t* const to = tensor.data + batch * tensor.batch_stride + head * tensor.head_stride +
                       int64_t{span.first} * tensor.seq_stride;
  float const scale = problem.features.scale;
  int32_t const row =
      first_row + (Config::kSplitsRows ? warpgroup * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
  int const first_column = Config::kSplitsRows ? 0 : warpgroup * Config::kGradQCols;
#pragma unroll
  for (int n = 0; n < Config::kGradQCols / 8; n += 4) {
    uint32_t upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 const x = *reinterpret_cast<const float4*>(from + grad_q_place(thread, n + i));
      upper[i] = Config::Dtype::pack(x.x * scale, x.y * scale);
      lower[i] = Config::Dtype::pack(x.z * scale, x.w * scale);
    }
    uint4 const chunks[2] = {transpose_quad(upper), transpose_quad(lower)};
    int const column = first_column + (n + thread % 4) * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 < span.count && column < problem.head_dim) {
        *reinterpret_cast<uint4*>(to + (row + half * 8) * tensor.seq_stride + column) =
            chunks[half];
      }
    }
  }
}

}  // namespace flashvar::sm90
