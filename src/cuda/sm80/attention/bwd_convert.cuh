// Kernel that converts the workspace's fp32 sums to the gradients' dtype: those of dQ, and those of
// dK and dV where several blocks share a key tile.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "core/unaligned.cuh"
#include "sm80/attention/query_tile.cuh"

namespace flashvar::sm80::attention {

struct ConvertArgs {
  const float* sums;  // in GradTile's layout
  Tensor grad;
  Sequences sequences;
  int64_t batch, tiles;  // tiles: per head, over all batches
  int32_t head_dim;
  float scale;   // the sums are multiplied by it
  bool aligned;  // every row of the gradient starts at a multiple of 16 bytes
};

// One block per tile and head.
template <class Dtype, class Tile>
__global__ void __launch_bounds__(32 * Tile::kWarps)
    bwd_convert_kernel(const __grid_constant__ ConvertArgs args) {
  int64_t const tile = blockIdx.x % args.tiles;
  int64_t const head = blockIdx.x / args.tiles;
  TileCoordinate const coordinate = args.sequences.find(
      static_cast<uint32_t>(tile), static_cast<uint32_t>(args.batch), Tile::kRows);
  Span const span = args.sequences.span(coordinate.batch);
  if (coordinate.first >= span.count) return;
  int64_t const number = head * args.tiles +
                         args.sequences.first_tile(coordinate.batch, Tile::kRows) +
                         coordinate.first / Tile::kRows;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* const from = args.sums + number * Tile::kElements + Tile::offset(warp, 0);
  uint16_t* const to = args.grad.data + coordinate.batch * args.grad.batch_stride +
                       head * args.grad.head_stride +
                       int64_t{span.first + coordinate.first} * args.grad.seq_stride;
  // A lane converts the eight columns of one row of an mma tile. In the workspace the even columns
  // of a row are adjacent, and so are the odd columns.
  constexpr int kLaneTiles = 2;  // a warp's 32 lanes take 16 rows of two mma tiles
#pragma unroll
  for (int m = 0; m < Tile::kMmaRows; ++m) {
    int const half = lane / 8 % 2;
    int32_t const row = Tile::row(warp) + m * 16 + half * 8 + lane % 8;
    if (coordinate.first + row >= span.count) continue;
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

}  // namespace flashvar::sm80::attention
