// What surrounds the backward's main kernel: D and the LSE in base 2 before it, the sums of the
// workspace rounded into the gradients after it.
#pragma once
#include <cstdint>

#include "core/dtype.cuh"
#include "core/online_softmax.cuh"
#include "core/problem.h"
#include "sm80/attention_bwd_block.cuh"
#include "sm80/attention_bwd_config.cuh"
#include "sm80/tiles.cuh"

namespace flashvar::sm80 {

inline constexpr int kRowThreads = 256;
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
    attention_bwd_rows_kernel(const __grid_constant__ AttentionBwdArguments args) {
  clear_outside(args.grad_q, args.queries, args.batch, args.heads_q, args.head_dim);
  clear_outside(args.grad_k, args.keys, args.batch, args.heads_q / args.group, args.head_dim);
  clear_outside(args.grad_v, args.keys, args.batch, args.heads_q / args.group, args.head_dim_v);

  if (args.query_tiles == 0) return;
  int64_t const tile = blockIdx.x % args.query_tiles;
  int32_t const head = static_cast<int32_t>(blockIdx.x / args.query_tiles);
  TilePosition const position =
      args.queries.find(static_cast<uint32_t>(tile), static_cast<uint32_t>(args.batch), kBlockQ);
  Span const span = args.queries.span(position.batch);
  if (position.first >= span.count) return;
  int64_t const sequence_tile = first_tile(args.queries, position.batch, kBlockQ);
  int64_t const padded = (head * args.query_tiles + sequence_tile) * kBlockQ + position.first;
  int64_t const lse_row =
      args.queries.offsets == nullptr
          ? (static_cast<int64_t>(position.batch) * args.heads_q + head) * args.queries.seqlen
          : int64_t{head} * args.queries.total + span.first;
  for (int32_t i = threadIdx.x / kRowLanes; i < kBlockQ; i += kRowThreads / kRowLanes) {
    int32_t const row = position.first + i;
    bool const valid = row < span.count;
    float sum = 0.f;
    if (valid) {
      auto of = [&](const TensorView& tensor) {
        return tensor.data + position.batch * tensor.batch_stride + head * tensor.head_stride +
               int64_t{span.first + row} * tensor.seq_stride;
      };
      const uint16_t* const out = of(args.out);
      const uint16_t* const grad_out = of(args.grad_out);
      for (int column = threadIdx.x % kRowLanes * kChunkElements; column < args.head_dim_v;
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
    float const lse = valid ? args.lse[lse_row + row] : -infinity();
    bool const empty = lse == -infinity();
    if (!empty && args.grad_lse != nullptr) sum -= args.grad_lse[lse_row + row];
    args.lse_log2[padded + i] = empty ? infinity() : lse * (1.f / kLn2);
    args.row_sums[padded + i] = empty ? 0.f : sum;
  }
}

struct ConvertArguments {
  const float* sums;
  TensorView grad;
  Sequences sequences;
  int64_t batch, tiles;
  int32_t head_dim;
  float scale;
  bool aligned;  // every row of the gradient starts on 16 bytes
};

// Rounds sums of the workspace into a gradient: one block per tile and head.
template <class Dtype, class Tile>
__global__ void __launch_bounds__(32 * Tile::kWarps)
    attention_bwd_convert_kernel(const __grid_constant__ ConvertArguments args) {
  int64_t const tile = blockIdx.x % args.tiles;
  int64_t const head = blockIdx.x / args.tiles;
  TilePosition const position = args.sequences.find(static_cast<uint32_t>(tile),
                                                    static_cast<uint32_t>(args.batch), Tile::kRows);
  Span const span = args.sequences.span(position.batch);
  if (position.first >= span.count) return;
  int64_t const number = head * args.tiles +
                         first_tile(args.sequences, position.batch, Tile::kRows) +
                         position.first / Tile::kRows;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* const from = args.sums + number * Tile::kElements + Tile::place(warp, 0);
  uint16_t* const to = args.grad.data + position.batch * args.grad.batch_stride +
                       head * args.grad.head_stride +
                       int64_t{span.first + position.first} * args.grad.seq_stride;
  // A lane takes the eight columns of a row of an mma tile: the even ones are side by side, and so
  // are the odd ones.
  constexpr int kLaneTiles = 2;  // mma tiles that the lanes of a warp take at once, in both halves
#pragma unroll
  for (int m = 0; m < Tile::kMmaRows; ++m) {
    int const half = lane / 8 % 2;
    int32_t const row = Tile::row(warp) + m * 16 + half * 8 + lane % 8;
    if (position.first + row >= span.count) continue;
#pragma unroll
    for (int n0 = 0; n0 < Tile::kMmaCols; n0 += kLaneTiles) {
      int const n = n0 + lane / 16;
      int const column = Tile::column(warp, n);
      if (column >= args.head_dim) continue;
      const float* const tile = from + Tile::step(m, n, half * 2) + lane % 8 * 4;
      float4 const even = *reinterpret_cast<const float4*>(tile);
      float4 const odd = *reinterpret_cast<const float4*>(tile + 32);
      uint4 const value = {Dtype::pack(even.x * args.scale, odd.x * args.scale),
                           Dtype::pack(even.y * args.scale, odd.y * args.scale),
                           Dtype::pack(even.z * args.scale, odd.z * args.scale),
                           Dtype::pack(even.w * args.scale, odd.w * args.scale)};
      uint16_t* const slot = to + row * args.grad.seq_stride + column;
      if (args.aligned) {
        *reinterpret_cast<uint4*>(slot) = value;
      } else {
        store_unaligned(slot, value);
      }
    }
  }
}

}  // namespace flashvar::sm80
