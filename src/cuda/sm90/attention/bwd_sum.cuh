// dK and dV of divided key tiles (key_tile_splits.h): the parts' stores, and the kernel that adds
// them up in order. It runs after the dK and dV kernel.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "core/launch.h"
#include "core/sequences.cuh"
#include "ptx/grid_dependency.cuh"
#include "sm90/attention/bwd_scores.cuh"
#include "sm90/attention/key_tile.cuh"

namespace flashvar::sm90::attention {

inline constexpr int kSumThreads = 256;
inline constexpr int kSumRows = kSumThreads / 32;  // keys of a block, one per warp

// Number of a split head's first row in the parts; of all its sequences if varlen.
__device__ __forceinline__ int64_t first_part_row(const BwdProblem& problem, int64_t split_heads,
                                                  uint32_t batch, int64_t split_head) {
  return problem.keys.offsets != nullptr ? split_head * problem.keys.total
                                         : (batch * split_heads + split_head) * problem.keys.seqlen;
}

// Stores a warpgroup's 64 rows of dK or dV: the gradient's, or those of a part, from row `first` of
// the tile's sequence on.
template <class Config, int kDim, class Tile>
__device__ __forceinline__ void store_key_grad(const BwdArgs& args, const Tensor& tensor,
                                               float* parts, const Tile& tile,
                                               const float (&grad)[kDim / 2], float scale,
                                               int32_t first, int32_t head_dim) {
  const BwdProblem& problem = args.problem;
  Span const rows = tile.rows();
  if (args.splits.count == 1) {
    store_grad<Config, kDim>(tensor, tile.batch, tile.split_head, rows, grad, scale, first,
                             head_dim);
    return;
  }
  uint32_t const thread = ptx::thread_index() % 128;
  int64_t const head = first_part_row(problem, args.split_heads(), tile.batch, tile.split_head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int32_t const row = first + thread / 32 * 16 + half * 8 + thread % 32 / 4;
    if (row >= rows.count) continue;
    float* const to = parts + (head + rows.first + row) * head_dim + thread % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (n * 8 >= head_dim) break;
      *reinterpret_cast<float2*>(to + n * 8) = {grad[4 * n + 2 * half] * scale,
                                                grad[4 * n + 2 * half + 1] * scale};
    }
  }
}

// The sum of a row's `count` parts, which are `pitch` elements apart, by one warp.
template <class Dtype>
__device__ __forceinline__ void sum_row(uint16_t* to, const float* parts, int64_t pitch,
                                        int32_t count, int32_t head_dim) {
  constexpr int kLoads = 8;  // in flight
  for (int32_t column = threadIdx.x % 32 * 4; column < head_dim; column += 128) {
    float4 sum = {};
    for (int32_t first = 0; first < count; first += kLoads) {
      float4 x[kLoads] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i < count) {
          x[i] = *reinterpret_cast<const float4*>(parts + (first + i) * pitch + column);
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        sum = {sum.x + x[i].x, sum.y + x[i].y, sum.z + x[i].z, sum.w + x[i].w};
      }
    }
    *reinterpret_cast<uint2*>(to + column) = {Dtype::pack(sum.x, sum.y), Dtype::pack(sum.z, sum.w)};
  }
}

// Two blocks, one for dK and one for dV, per tile of kSumRows keys and kv head. Here the arguments'
// group is the query heads of a kv head, not of a split head.
template <class Dtype>
__global__ void __launch_bounds__(kSumThreads)
    bwd_sum_kernel(const __grid_constant__ BwdArgs args) {
  const BwdProblem& problem = args.problem;
  uint32_t const tiles = static_cast<uint32_t>(problem.keys.tiles(problem.batch, kSumRows));
  uint32_t const unit = blockIdx.x / 2, head = unit / tiles;
  TileCoordinate const tile =
      problem.keys.find(unit % tiles, static_cast<uint32_t>(problem.batch), kSumRows);
  Span const span = problem.keys.span(tile.batch);
  int32_t const in_sequence = tile.first + threadIdx.x / 32;
  ptx::griddepcontrol_wait();  // dK and dV kernel: all parts are stored
  if (in_sequence >= span.count) return;
  int32_t const count = args.splits.count;
  int64_t const row = span.first + in_sequence, heads = problem.heads_q / problem.group;
  int64_t const rows = problem.keys.offsets != nullptr ? problem.keys.total : problem.keys.seqlen;
  int64_t const first =
      first_part_row(problem, heads * count, tile.batch, int64_t{head} * count) + row;
  auto sum = [&](const Tensor& tensor, const float* parts, int32_t head_dim) {
    uint16_t* const to = tensor.data + tile.batch * tensor.batch_stride +
                         head * tensor.head_stride + row * tensor.seq_stride;
    sum_row<Dtype>(to, parts + first * head_dim, rows * head_dim, count, head_dim);
  };
  if (blockIdx.x % 2 == 0) {
    sum(problem.grad_k, args.splits.grad_k, problem.head_dim);
  } else {
    sum(problem.grad_v, args.splits.grad_v, problem.head_dim_v);
  }
}

template <class Dtype>
cudaError_t launch_sum(const BwdArgs& args, int device, cudaStream_t stream) {
  const BwdProblem& problem = args.problem;
  int64_t const tiles = problem.keys.tiles(problem.batch, kSumRows);
  int64_t const blocks = 2 * tiles * (problem.heads_q / problem.group);
  LaunchShape const shape{blocks, kSumThreads, 0, true};
  return launch_kernel<bwd_sum_kernel<Dtype>>(args, shape, device, stream);
}

}  // namespace flashvar::sm90::attention
