// Copies a tensor whose tokens are contiguous, or neither tokens nor channels, into one whose
// channels are. For the gradient of y, if it alone is laid out so: models that transpose or split y
// get it in another order than y's.
#pragma once
#include <cstdint>

#include "causal_conv1d/tensors.cuh"
#include "causal_conv1d/tiles.h"
#include "core/ceil_div.h"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

// Tokens and channels of a block.
inline constexpr int kCopyTile = 64;

struct ChannelRowsArgs {
  Tensor from;  // [batch, seqlen, dim]
  void* to;     // likewise, contiguous
  int64_t seqlen, dim, token_tiles, channel_tiles;

  static ChannelRowsArgs make(const Problem& problem, const Tensor& from, void* to) {
    return {from,
            to,
            problem.seqlen,
            problem.dim,
            ceil_div(problem.seqlen, kCopyTile),
            ceil_div(problem.dim, kCopyTile)};
  }
  int64_t blocks(const Problem& problem) const {
    return problem.batch * token_tiles * channel_tiles;
  }
};

template <class Word>
__global__ void __launch_bounds__(kThreads)
    channel_rows_kernel(const __grid_constant__ ChannelRowsArgs args) {
  constexpr int kGroups = kThreads / kCopyTile;
  // Rows are an odd number of 4-byte words apart, so that a column's elements are in all banks.
  __shared__ Word tile[kCopyTile][kCopyTile + 4 / sizeof(Word)];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the tensor
  int const lane = threadIdx.x % kCopyTile, group = threadIdx.x / kCopyTile;
  int64_t const block = blockIdx.x, tile_of_batch = block / args.channel_tiles;
  int64_t const batch = tile_of_batch / args.token_tiles;
  int64_t const channel = (block - tile_of_batch * args.channel_tiles) * kCopyTile;
  int64_t const token = (tile_of_batch - batch * args.token_tiles) * kCopyTile;
  const auto* const from =
      static_cast<const Word*>(args.from.data) + offset(args.from, batch, token + lane, channel);
  if (token + lane < args.seqlen) {
#pragma unroll
    for (int i = group; i < kCopyTile; i += kGroups) {
      if (channel + i < args.dim) tile[i][lane] = from[i * args.from.strides[2]];
    }
  }
  __syncthreads();  // the tile is loaded
  if (channel + lane >= args.dim) return;
  Word* const to =
      static_cast<Word*>(args.to) + (batch * args.seqlen + token) * args.dim + channel + lane;
#pragma unroll
  for (int i = group; i < kCopyTile; i += kGroups) {
    if (token + i < args.seqlen) to[i * args.dim] = tile[lane][i];
  }
}

}  // namespace flashvar::causal_conv1d
