// The walk over the queries that see a tile of keys, and where their dQ is summed up.
#pragma once
#include <cstdint>

#include "sm90/attention_bwd_pipeline.cuh"

namespace flashvar::sm90 {

// for_each_step() for a consumer that has to look ahead.
template <class Tile>
struct QueryWalk {
  const Tile& tile;
  int32_t m, left;          // this block of queries, and how many steps are left with this one
  uint32_t number, before;  // KeyTile::query_tile() of it and of the one before, or kNone

  static constexpr uint32_t kNone = 0xffffffff;

  __device__ __forceinline__ QueryWalk(const AttentionBwdArguments& arguments, const Tile& tile)
      : tile(tile),
        m(tile.reversed() ? tile.end - 1 : tile.begin),
        left(arguments.problem.group * (tile.end - tile.begin)),
        number(tile.query_tile(arguments, tile.head_kv * arguments.problem.group, m)),
        before(kNone) {}

  __device__ __forceinline__ void advance(const AttentionBwdArguments& arguments) {
    before = number;
    number += arguments.query_tiles;
    uint32_t const heads = arguments.problem.group * arguments.query_tiles;
    if (number >= (tile.head_kv + 1) * heads) {  // past the last head of the group
      int32_t const on = tile.reversed() ? -1 : 1;
      m += on;
      number += static_cast<uint32_t>(on) - heads;
    }
    --left;
  }
};

// A warpgroup's part of the sums of dQ; `tile` is KeyTile::query_tile().
template <class Config>
__device__ __forceinline__ float* grad_q_part(const AttentionBwdArguments& arguments, uint32_t tile,
                                              uint32_t warpgroup) {
  return arguments.grad_q_sum + (uint64_t{tile} * 2 + warpgroup) * Config::kGradQElements;
}

}  // namespace flashvar::sm90
