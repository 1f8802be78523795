// The order in which a CTA visits the query blocks to which its key tile is visible.
#pragma once
#include <cstdint>

#include "sm90/attention/key_tile.cuh"

namespace flashvar::sm90::attention {

// Calls step(head, m) for each of these query blocks, of all query heads of the group.
//
// Where a key tile sees all queries on one side of it, heads vary fastest. The first tiles of pairs
// start at the same time and visit queries in descending order; the second tiles end at the same
// time and visit queries in ascending order. So CTAs of one kv head are at the same queries at any
// time, and find Q, dO and the sums of dQ in L2. In short windows, CTAs that run at the same time
// have neighboring key tiles, which see different queries: there queries vary fastest, so that the
// data in use at a time belong to one head.
//
// For producers, which need heads. QueryIterator has the same order in other variables, for which
// consumers have registers: a change of one is a change of both.
template <class Tile, class Step>
__device__ __forceinline__ void for_each_step(const BwdArgs& args, const Tile& tile, Step&& step) {
  int32_t const group = args.problem.group;
  uint32_t head = tile.part_of_heads() * group;
  int32_t m = tile.reversed() ? tile.end - 1 : tile.begin;
#pragma unroll 1
  for (int32_t left = group * (tile.end - tile.begin); left > 0; --left) {
    step(head, m);
    if (tile.heads_outermost(args)) {  // no pairs: in descending order
      if (--m < tile.begin) {
        m = tile.end - 1;
        ++head;
      }
    } else if (++head == (tile.part_of_heads() + 1) * group) {
      head -= group;
      m += tile.reversed() ? -1 : 1;
    }
  }
}

// Iterator in the order of for_each_step(), which must stay the same: else consumers would take
// LSE, delta and dQ of other rows than Q's. For consumers, which also need the next and the
// previous step.
template <class Tile>
struct QueryIterator {
  const Tile& tile;
  int32_t m, left;            // current query block; number of steps left, this one included
  uint32_t number, previous;  // query_tile() of this step and of the previous one, or kNone

  static constexpr uint32_t kNone = 0xffffffff;

  __device__ __forceinline__ QueryIterator(const BwdArgs& args, const Tile& tile)
      : tile(tile),
        m(tile.reversed() ? tile.end - 1 : tile.begin),
        left(args.problem.group * (tile.end - tile.begin)),
        number(tile.query_tile(args, tile.part_of_heads() * args.problem.group, m)),
        previous(kNone) {}

  __device__ __forceinline__ void advance(const BwdArgs& args) {
    previous = number;
    if (tile.heads_outermost(args)) {
      --number;
      if (--m < tile.begin) {  // past the head's last block
        int32_t const count = tile.end - tile.begin;
        m += count;
        number += static_cast<uint32_t>(args.query_tiles + count);
      }
    } else {
      number += args.query_tiles;
      uint32_t const heads = args.problem.group * args.query_tiles;
      if (number >= (tile.part_of_heads() + 1) * heads) {  // past the group's last head
        int32_t const direction = tile.reversed() ? -1 : 1;
        m += direction;
        number += static_cast<uint32_t>(direction) - heads;
      }
    }
    --left;
  }
};

}  // namespace flashvar::sm90::attention
