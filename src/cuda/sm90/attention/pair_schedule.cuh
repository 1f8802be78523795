// The static schedule of dense sequences under a causal mask, whose tiles differ in work.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/ceil_div.h"

namespace flashvar::sm90::attention {

// The tail of a schedule of pairs: the tiles that CTAs take one by one, after the rounds in which
// each takes a pair (a round is a wave of pairs). A row is the tiles of one head of one sequence,
// and a tile's position in it is counted from the tile with the most work.
//
// The tail is all tiles of the last `rows` rows, which start at first_row, and, if the pairs
// stopped inside row first_row - 1 (pairs > 0), the tiles of that row that are not among its first
// or last `pairs`. Tiles of the tail are ordered by position, the heaviest first, then by row.
struct PairTail {
  uint32_t first_row, rows;
  uint32_t pairs;
  uint32_t count;  // tiles of the tail

  // `units`: pairs before the tail. Host only.
  static PairTail make(uint32_t units, uint32_t all_rows, uint32_t tiles_per_row) {
    uint32_t const pairs_per_row = (tiles_per_row + 1) / 2;
    PairTail tail{};
    tail.pairs = units % pairs_per_row;
    tail.first_row = ceil_div(units, pairs_per_row);
    tail.rows = all_rows - tail.first_row;
    tail.count = tail.rows * tiles_per_row + (tail.pairs > 0 ? tiles_per_row - 2 * tail.pairs : 0);
    return tail;
  }

  // A part of the order: the first `pairs` positions, those between, or the last `pairs`. The same
  // `width` rows, from `row` on, have a tile at every position of a part, so that tile `number` of
  // a part is at position block + number / width, in row row + number % width.
  struct Part {
    uint32_t number, width, row, block;
  };
  __device__ __forceinline__ Part find(uint32_t number, uint32_t tiles_per_row) const {
    uint32_t const partial = pairs > 0 ? 1 : 0, ends = pairs * rows;
    if (number < ends) return {number, rows, first_row, 0};
    number -= ends;
    uint32_t const middle = (tiles_per_row - 2 * pairs) * (rows + partial);
    if (number < middle) return {number, rows + partial, first_row - partial, pairs};
    return {number - middle, rows, first_row, tiles_per_row - pairs};
  }
};

// CTAs take pairs of tiles of one row, the n-th from the start and the n-th from the end, which
// have equal work. Where some CTAs would have no pair in the last round, the tiles of the last two
// rounds are taken one by one, those with the most work first, by the CTAs in ascending order, then
// in descending order, and so on. No CTA has then much more work than the mean.
struct PairSchedule {
  uint32_t rounds;  // in which each CTA takes a pair
  PairTail tail;

  // `pairs`: in all rows. Host only.
  static PairSchedule make(uint32_t pairs, uint32_t rows, uint32_t tiles_per_row, uint32_t ctas) {
    uint32_t const all = ceil_div(pairs, ctas);
    uint32_t const rounds = pairs % ctas == 0 ? all : all > 2 ? all - 2 : 0;
    return {rounds, PairTail::make(std::min(rounds * ctas, pairs), rows, tiles_per_row)};
  }

  // How many of `most` CTAs, each on an SM of its own, take pairs: a CTA takes every n-th, where n
  // is their number. The middle one of an odd number of tiles has no partner, and about half of a
  // pair's work. If n had a factor in common with the pairs of a row, some CTAs would take many
  // such tiles, others none. Host only.
  static uint32_t balanced_ctas(uint32_t pairs, uint32_t rows, uint32_t tiles_per_row,
                                uint32_t most) {
    bool const several_rounds = pairs > most && make(pairs, rows, tiles_per_row, most).rounds > 1;
    if (tiles_per_row % 2 == 0 || !several_rounds) return std::min(pairs, most);
    uint32_t ctas = most;
    while (std::gcd(ctas, (tiles_per_row + 1) / 2) > 1) --ctas;
    return ctas;
  }

  // The CTA's tile of a round of the tail; it need not exist.
  __device__ __forceinline__ static uint32_t tail_tile(uint32_t round) {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
};

}  // namespace flashvar::sm90::attention
