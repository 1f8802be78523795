// How tiles of queries are dealt out over blocks (query_tiles.cuh).
#pragma once
#include <cstdint>

#include "core/divisor.h"
#include "core/problem.h"

namespace flashvar::sm90 {

struct QueryItems {
  uint32_t items;      // tiles of kBlockQ query rows, or pairs of them, over all heads and batches
  uint32_t row_items;  // of one head: of one sequence, or of all where they are packed
  bool paired;
  Divisor by_row_items, by_heads_q, by_group;
  uint32_t* next_item;  // 0 at the start: how many items were asked for; null: they are dealt out

  // False where 31 bits do not number them. Without more items than blocks nobody asks for another,
  // and `counter`, which may be null, is not used. Host only.
  bool deal_out(const AttentionProblem& problem, int block_q, int multiprocessors,
                uint32_t* counter) {
    bool const packed = problem.queries.offsets != nullptr;
    int64_t const rows = packed ? problem.heads_q : problem.heads_q * problem.batch;
    int64_t const tiles = problem.queries.tiles(packed ? problem.batch : 1, block_q);
    paired = problem.window_right != kUnbounded && rows * tiles > multiprocessors;
    int64_t const of_row = !paired  ? tiles
                           : packed ? problem.queries.tiles(problem.batch, 2 * block_q)
                                    : (tiles + 1) / 2;
    if (rows * of_row > INT32_MAX) return false;
    row_items = static_cast<uint32_t>(of_row);
    items = static_cast<uint32_t>(rows * of_row);
    by_row_items = Divisor::make(row_items);
    by_heads_q = Divisor::make(problem.heads_q);
    by_group = Divisor::make(problem.group);
    next_item = packed && items > static_cast<uint32_t>(multiprocessors) ? counter : nullptr;
    return true;
  }
};

}  // namespace flashvar::sm90
