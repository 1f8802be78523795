// The sums of the backward's workspace, rounded into the gradients.
#pragma once
#include <cstdint>

#include "core/problem.h"
#include "core/unaligned.cuh"

namespace flashvar::sm80 {

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
                         args.sequences.first_tile(position.batch, Tile::kRows) +
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
