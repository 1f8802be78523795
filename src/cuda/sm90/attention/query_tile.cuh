// QueryTile: one query tile of one head, and the key blocks visible to its queries; with kSplits,
// those of a split.
#pragma once
#include <cstdint>

#include "attention/mask.cuh"
#include "core/ceil_div.h"
#include "sm90/attention/scheduler.cuh"

namespace flashvar::sm90::attention {

template <class Config>
struct QueryTile {
  Mask mask;
  uint32_t batch, head, head_kv;
  uint32_t split;        // with kSplits
  int32_t first_query;   // within the sequence; with row_shift, the first row
  int32_t row_q, row_k;  // tensor rows at which the sequence starts
  int32_t begin, end;    // key blocks visible to some query of the tile
  int32_t row_shift;     // with kSplits: KeySplits

  template <class Args>
  __device__ __forceinline__ QueryTile(const Args& args, const WorkTile& work_tile)
      : batch(work_tile.batch), head(work_tile.head), split(0), first_query(work_tile.first_query) {
    const Problem& problem = args.problem;
    if constexpr (Config::kSplits) {
      row_shift = problem.splits.row_shift;
      head = work_tile.head / args.splits_divisor;
      split = work_tile.head - head * problem.splits.count;
    }
    head_kv = head / args.group_divisor;
    Span const queries = problem.queries.span(batch), keys = problem.keys_in_use(batch);
    row_q = queries.first;
    row_k = keys.first;
    if constexpr (Config::kSplits) {
      // The length of a dense sequence is in rows, that of a varlen one in queries.
      bool const varlen = problem.queries.offsets != nullptr;
      int32_t const count = varlen ? queries.count : query(queries.count);
      mask = {count, keys.count, problem.window_left, problem.window_right};
      int32_t const last = min(query(first_query + Config::kBlockQ - 1), count - 1);
      begin = mask.key_begin(query(first_query)) / Config::kBlockKV;
      end = ceil_div(mask.key_end(last), Config::kBlockKV);
    } else {
      mask = {queries.count, keys.count, problem.window_left, problem.window_right};
      int32_t const last = min(first_query + Config::kBlockQ, mask.seqlen_q) - 1;
      begin = mask.key_begin(first_query) / Config::kBlockKV;
      end = ceil_div(mask.key_end(last), Config::kBlockKV);
    }
    if constexpr (Config::kSplits) {
      int32_t const size = (max(end - begin, 0) + problem.splits.count - 1) / args.splits_divisor;
      begin += static_cast<int32_t>(split) * size;
      end = min(begin + size, end);
    }
  }

  // With kSplits: the query of a row of the sequence. In the other variants rows are queries. They
  // do not call it, because even a call that returns `row` would change their registers and the
  // order of their instructions.
  __device__ __forceinline__ int32_t query(int32_t row) const { return row >> row_shift; }

  // End of the key blocks visible to a warpgroup's rows. At least begin + 1, also where it has no
  // rows, so that every consumer computes at least one block.
  __device__ __forceinline__ int32_t key_blocks_end(uint32_t warpgroup) const {
    int32_t const first = first_query + static_cast<int32_t>(warpgroup) * 64;
    if constexpr (Config::kSplits) {
      uint32_t const keys = mask.key_end(query(first + 63));
      int32_t const own = ceil_div(keys, Config::kBlockKV);
      return max(query(first) < mask.seqlen_q ? min(own, end) : begin, begin + 1);
    }
    uint32_t const keys = mask.key_end(first + 63);  // unsigned: its division takes fewer registers
    int32_t const own = ceil_div(keys, Config::kBlockKV);
    return max(first < mask.seqlen_q ? min(own, end) : begin, begin + 1);
  }

  // The load warp releases the work tile before it loads this key block, and no earlier: with the
  // dynamic schedule the scheduler would take the next unit too soon, and another CTA might be
  // idle.
  __device__ __forceinline__ int32_t release_at() const {
    return min(begin + Config::kBlocksAhead, end - 1);
  }

  // Whether any key is visible to a query of the tile.
  __device__ __forceinline__ bool has_keys() const { return begin < end; }
};

}  // namespace flashvar::sm90::attention
