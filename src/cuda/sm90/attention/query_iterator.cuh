// The order in which a CTA visits the query blocks that see its key tile.
#pragma once
#include <cstdint>

#include "sm90/attention/key_tile.cuh"

namespace flashvar::sm90::attention {

// Calls step(head, m) for the query blocks that see a tile, of all heads of its group. Heads are
// innermost. Tiles that start together (the first of a pair) take queries in descending order,
// those that end together in ascending order: CTAs of the same kv heads are then at the same
// queries under any mask, and find them, and the sums of dQ, in L2.
template <class Tile, class Step>
__device__ __forceinline__ void for_each_step(const Tile& tile, int32_t group, Step&& step) {
  uint32_t head = tile.head_kv * group;
  int32_t m = tile.reversed() ? tile.end - 1 : tile.begin;
#pragma unroll 1
  for (int32_t left = group * (tile.end - tile.begin); left > 0; --left) {
    step(head, m);
    if (++head == (tile.head_kv + 1) * group) {
      head -= group;
      m += tile.reversed() ? -1 : 1;
    }
  }
}

// The order of for_each_step(), for consumers that look one step ahead and one back.
template <class Tile>
struct QueryIterator {
  const Tile& tile;
  int32_t m, left;            // current query block; steps left, this one included
  uint32_t number, previous;  // query_tile() of the current and of the previous step, or kNone

  static constexpr uint32_t kNone = 0xffffffff;

  __device__ __forceinline__ QueryIterator(const BwdArgs& args, const Tile& tile)
      : tile(tile),
        m(tile.reversed() ? tile.end - 1 : tile.begin),
        left(args.problem.group * (tile.end - tile.begin)),
        number(tile.query_tile(args, tile.head_kv * args.problem.group, m)),
        previous(kNone) {}

  __device__ __forceinline__ void advance(const BwdArgs& args) {
    previous = number;
    number += args.query_tiles;
    uint32_t const heads = args.problem.group * args.query_tiles;
    if (number >= (tile.head_kv + 1) * heads) {  // past the group's last head
      int32_t const direction = tile.reversed() ? -1 : 1;
      m += direction;
      number += static_cast<uint32_t>(direction) - heads;
    }
    --left;
  }
};

// A warpgroup's part of the fp32 sums of dQ; `tile`: query_tile().
template <class Config>
__device__ __forceinline__ float* grad_q_part(const BwdArgs& args, uint32_t tile,
                                              uint32_t warpgroup) {
  return args.grad_q_sum + (uint64_t{tile} * 2 + warpgroup) * Config::kGradQElements;
}

}  // namespace flashvar::sm90::attention
