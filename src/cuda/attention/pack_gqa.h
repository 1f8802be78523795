// PackGQA (FlashAttention's word): where sequences have one query or a few, the query heads of a
// group, its members, become rows of one tile, so that keys and values are read once for all of
// them. Host only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/key_splits.h"
#include "attention/problem.h"
#include "core/ceil_div.h"

namespace flashvar::attention {

// Whether PackGQA is possible for a call of one query per sequence: what differs between the
// members of a group must be addressed by strides, and all rows must see the same keys.
inline bool can_pack_gqa(const FwdProblem& problem) {
  // Varlen: a bound of 1 means that a sequence has one query or none. batch_of_queries() needs at
  // least one query in all.
  bool const varlen = problem.queries.offsets != nullptr;
  bool const one_query = problem.queries.seqlen == 1 && (!varlen || problem.queries.total > 0);
  bool const has_bias = problem.modifiers.bias.data != nullptr;
  // fwd_merge_kernel has no variant for modifiers.
  bool const can_merge = !problem.has_modifiers();
  bool const must_merge = varlen || problem.sinks.data != nullptr;  // needs_merge() once packed
  return one_query && problem.group > 1 && problem.modifiers.alibi_slopes == nullptr &&
         problem.modifiers.rng == nullptr && (!must_merge || can_merge) &&
         (problem.window_left == kUnbounded || (!problem.has_foreign_tail() && !has_bias));
}

// PackGQA of one query per sequence: the problem with the query heads of a group as the queries of
// one head. The one query's diagonal is the last key, so a window to the left moves the first key.
inline FwdProblem pack_gqa(FwdProblem problem) {
  int32_t const group = problem.group;
  problem.splits.group_rows = group;
  problem.splits.query_offsets = problem.queries.offsets;
  problem.queries.offsets = nullptr;
  auto pack = [&](Tensor& tensor) {
    if (problem.splits.query_offsets != nullptr) tensor.batch_stride = tensor.seq_stride;
    tensor.seq_stride = tensor.head_stride;
    tensor.head_stride *= group;
  };
  pack(problem.q);
  pack(problem.out);
  BiasView& bias = problem.modifiers.bias;
  bias.query_stride = bias.head_stride;
  bias.head_stride *= group;
  if (problem.window_left != kUnbounded) {
    int64_t const first = int64_t{problem.keys.seqlen} - problem.window_left - 1;
    int32_t const hidden = static_cast<int32_t>(std::max(first, int64_t{0}));
    for (Tensor* tensor : {&problem.k, &problem.v}) {
      if (tensor->data != nullptr) tensor->data += hidden * tensor->seq_stride;
    }
    problem.keys.seqlen -= hidden;
    problem.window_left = kUnbounded;
  }
  problem.queries.seqlen = group;
  problem.heads_q /= group;
  problem.group = 1;
  return problem;
}

// PackGQA of several queries per sequence: the problem with the rows of all query heads of a group
// as the queries of one head.
inline FwdProblem pack_gqa(FwdProblem problem, int32_t row_shift) {
  KeySplits& splits = problem.splits;
  splits.row_shift = row_shift;
  splits.group_rows = 1 << row_shift;
  splits.members = problem.group;
  splits.member_stride = problem.q.head_stride;
  problem.q.head_stride *= problem.group;
  problem.queries.seqlen <<= row_shift;
  problem.heads_q /= problem.group;
  problem.group = 1;
  return problem;
}

// The tile in which the time of a call of several queries per sequence is estimated, with PackGQA
// and without. One stands for all tiles of a family's kernels: that whose estimates agree best with
// measured times (docs/hopper-ledger.md, "A few queries per sequence").
struct PackGqaTile {
  int32_t rows, keys;
  int64_t blocks_per_sm;  // of a call without PackGQA
  int32_t fewest_keys;    // with fewer keys the estimate is wrong, or was not compared
};

// The row_shift (KeySplits) of PackGQA of several queries per sequence; 0: none. Heads are packed
// if (1) that at least halves the number of tiles of kRows rows, and (2) the call is estimated to
// be faster. It may be slower, because most kernels then need fwd_merge_kernel, and because without
// PackGQA the tiles of all heads may fit in one wave.
inline int32_t row_shift_of(const FwdProblem& problem, const PackGqaTile& tile) {
  constexpr int32_t kRows = 64;
  int64_t const queries = problem.queries.seqlen;
  if (problem.queries.offsets != nullptr || queries < 2 || problem.has_modifiers() ||
      problem.keys.seqlen < tile.fewest_keys || problem.group == 1 || problem.group > kRows) {
    return 0;
  }
  int32_t shift = 1;
  while (1 << shift < problem.group) ++shift;
  if (2 * ceil_div(queries << shift, kRows) > problem.group * ceil_div(queries, kRows)) return 0;
  int64_t const packed = SplitChoice::make(pack_gqa(problem, shift), tile.rows, tile.keys, 1).time;
  int64_t const unpacked =
      SplitChoice::make(problem, tile.rows, tile.keys, tile.blocks_per_sm).time;
  return packed < unpacked ? shift : 0;
}

// The problem as kernels compute it. A window to the right hides nothing from the last query.
inline FwdProblem simplified(FwdProblem problem, const PackGqaTile& tile) {
  if (problem.queries.seqlen == 1) problem.window_right = kUnbounded;
  if (can_pack_gqa(problem)) return pack_gqa(problem);
  int32_t const row_shift = row_shift_of(problem, tile);
  return row_shift > 0 ? pack_gqa(problem, row_shift) : problem;
}

}  // namespace flashvar::attention
