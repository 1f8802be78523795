// The walk over the queries that see a tile of keys, and where their dQ is summed up.
#pragma once
#include <cstdint>

#include "ptx/counters.cuh"
#include "ptx/special_registers.cuh"
#include "sm90/attention_bwd_pipeline.cuh"
#include "sm90/attention_bwd_ragged.cuh"

namespace flashvar::sm90 {

// One after the other the blocks of queries that see a tile, of all heads of its group.
template <class Tile>
struct QueryWalk {
  const Tile& tile;
  int32_t m, left;          // this block, and how many are left with it
  uint32_t number, before;  // KeyTile::query_tile() of it and of the one before

  __device__ __forceinline__ QueryWalk(const AttentionBwdArguments& arguments, const Tile& tile)
      : tile(tile),
        m(Tile::kReversed ? tile.end - 1 : tile.begin),
        left(arguments.problem.group * (tile.end - tile.begin)),
        number(tile.query_tile(arguments, tile.head_kv * arguments.problem.group, m)),
        before(0) {}

  __device__ __forceinline__ void advance(const AttentionBwdArguments& arguments) {
    if constexpr (Tile::kReversed) {
      before = number--;
      if (m == tile.begin) {
        m = tile.end;
        number += arguments.query_tiles + (tile.end - tile.begin);
      }
      --m;
    } else {
      before = number++;
      if (++m == tile.end) m = tile.begin;
      if (m == tile.begin) number += arguments.query_tiles - (tile.end - tile.begin);
    }
    --left;
  }
};

// Calls step(head, m) for the same.
template <class Tile, class Step>
__device__ __forceinline__ void for_each_step(const Tile& tile, int32_t group, Step&& step) {
  for (int32_t g = 0; g < group; ++g) {
    for (int32_t i = tile.begin; i < tile.end; ++i) {
      int32_t const m = Tile::kReversed ? tile.end - 1 - (i - tile.begin) : i;
      step(tile.head_kv * group + g, m);
    }
  }
}

// `tile` is KeyTile::query_tile().
template <class Config>
__device__ __forceinline__ float* grad_q_part(const AttentionBwdArguments& arguments, uint32_t tile,
                                              uint32_t warpgroup) {
  if constexpr (!Config::kOrdered) {
    return arguments.grad_q_sum + (uint64_t{tile} * 2 + warpgroup) * Config::kGradQElements;
  }
  return arguments.grad_q_sum + uint64_t{tile} * Config::kTileElements +
         warpgroup * Config::kGradQElements;
}

// The warp has added. Said late, when it has something to wait for anyway: until then its additions
// have mostly arrived.
template <class Config>
__device__ __forceinline__ void pass_turn(const AttentionBwdArguments& arguments, uint32_t tile) {
  if constexpr (Config::kOrdered) {
    __syncwarp();
    if (ptx::thread_index() % 32 == 0) ptx::release_count(grad_q_turns<Config>(arguments, tile));
  }
}

}  // namespace flashvar::sm90
