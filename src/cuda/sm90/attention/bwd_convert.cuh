// Kernel that converts the fp32 sums of dQ to the gradient's dtype; runs after the dK and dV
// kernel.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "ptx/grid_dependency.cuh"
#include "sm90/attention/bwd_grad_q.cuh"
#include "sm90/attention/key_tile.cuh"

namespace flashvar::sm90::attention {

template <class Config>
inline constexpr int kConvertThreads = 128 * Config::kConsumers;

// One block per query tile and head.
template <class Config>
__global__ void __launch_bounds__(kConvertThreads<Config>)
    bwd_convert_kernel(const __grid_constant__ BwdArgs args) {
  const BwdProblem& problem = args.problem;
  ptx::griddepcontrol_wait();  // dK and dV kernel: all dQ is added
  Sequences queries = problem.queries;
  if constexpr (!Config::kDynamic) queries.offsets = nullptr;  // removes the varlen branches
  uint32_t const head = blockIdx.x / args.query_tiles;
  TileCoordinate const coordinate = queries.find(
      blockIdx.x % args.query_tiles, static_cast<uint32_t>(problem.batch), Config::kBlockQ);
  uint32_t const batch = coordinate.batch;
  int32_t const first_row = coordinate.first;
  Span const span = queries.span(batch);
  if (first_row >= span.count) return;
  int64_t tile = blockIdx.x;
  if constexpr (Config::kDynamic) {
    tile = int64_t{head} * args.query_tiles + queries.first_tile(batch, Config::kBlockQ) +
           first_row / Config::kBlockQ;
  }
  uint32_t const warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const float* const from =
      args.grad_q_sum + tile * Config::kTileElements + int64_t{warpgroup} * Config::kGradQElements;
  const Tensor& tensor = problem.grad_q;
  uint16_t* const to = tensor.data + batch * tensor.batch_stride + head * tensor.head_stride +
                       int64_t{span.first} * tensor.seq_stride;
  float const scale = problem.modifiers.scale;
  int32_t const row =
      first_row + (Config::kSplitsRows ? warpgroup * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
  int const first_column = Config::kSplitsRows ? 0 : warpgroup * Config::kGradQCols;
#pragma unroll
  for (int n = 0; n < Config::kGradQCols / 8; n += 4) {
    uint32_t upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 const x = *reinterpret_cast<const float4*>(from + grad_q_offset(thread, n + i));
      upper[i] = Config::Dtype::pack(x.x * scale, x.y * scale);
      lower[i] = Config::Dtype::pack(x.z * scale, x.w * scale);
    }
    uint4 const units[2] = {transpose_quad(upper), transpose_quad(lower)};
    int const column = first_column + (n + thread % 4) * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 < span.count && column < problem.head_dim) {
        *reinterpret_cast<uint4*>(to + (row + half * 8) * tensor.seq_stride + column) = units[half];
      }
    }
  }
}

}  // namespace flashvar::sm90::attention
