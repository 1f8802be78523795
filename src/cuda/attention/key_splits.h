// Split-KV (Flash-Decoding: Dao et al., 2023), for calls of few queries and many keys, whose query
// tiles are fewer than the blocks that a device runs: several blocks have a query tile, each with a
// range of its key blocks, a split, and fwd_merge_kernel merges their results. Host only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/problem.h"
#include "core/ceil_div.h"

namespace flashvar::attention {

// SMs of the device for which the number of splits is chosen. A constant, so that results do not
// depend on the device.
inline constexpr int64_t kMultiprocessors = 132;
inline constexpr int64_t kMaxSplits = 128;

// The most keys that some query of a tile of block_q queries sees.
inline int64_t visible_keys(const FwdProblem& problem, int32_t block_q) {
  int64_t const keys = problem.keys.seqlen;
  if (problem.window_left == kUnbounded) return keys;
  int32_t const queries = problem.queries.seqlen >> problem.splits.row_shift;
  // Each query of a tile has a diagonal of its own; that of a sequence's last query is the last
  // key.
  int64_t const diagonals = std::min(queries, block_q >> problem.splits.row_shift);
  int64_t const after = problem.window_right != kUnbounded ? int64_t{problem.window_right}
                                                           : int64_t{queries} - diagonals;
  return std::min(keys, int64_t{problem.window_left} + diagonals + after);
}

// Whether most kernels need fwd_merge_kernel to store the results, even those of one split: with
// PackGQA, if rows of a tile differ in their sinks, or are not adjacent in the log-sum-exp.
// (fwd_few_kernel of 9.0 stores them itself, unless it has splits that are no cluster.)
inline bool needs_merge(const FwdProblem& problem) {
  const KeySplits& splits = problem.splits;
  bool const by_row = problem.sinks.data != nullptr || splits.query_offsets != nullptr;
  return splits.row_shift > 0 || (splits.group_rows > 1 && by_row);
}

// What a call's query tiles have to do.
struct TileWork {
  int64_t tiles;       // of all heads
  int64_t most, mean;  // key blocks of a tile; under a causal mask the mean one sees fewer
  bool causal;

  static TileWork make(const FwdProblem& problem, int32_t block_q, int32_t block_kv) {
    bool const causal = problem.window_right != kUnbounded && problem.window_left == kUnbounded;
    int64_t const most = ceil_div(visible_keys(problem, block_q), block_kv);
    int32_t const queries = problem.queries.seqlen >> problem.splits.row_shift;
    int64_t const hidden = std::min(queries, problem.keys.seqlen) / (2 * block_kv);
    return {problem.queries.tiles(problem.batch, block_q) * problem.heads_q, most,
            causal ? std::max(most - hidden, int64_t{1}) : most, causal};
  }
};

// Cost model for the number of splits, and for PackGQA. Unit: the time that a CTA alone on its SM
// takes for one key block. A CTA costs its key blocks and kStart, and up to kStore more if its
// results are to be merged: those of several splits, or where needs_merge(). fwd_merge_kernel costs
// kMerge, plus half a unit per kMergeSplits splits. n CTAs that share an SM take as long as
// (n + 1) / 2 CTAs one after the other.
struct SplitChoice {
  static constexpr int64_t kStart = 2, kStore = 3, kMerge = 4, kMergeSplits = 8;
  // Numbers of CTAs that are considered, in quarters of a wave.
  static constexpr int kQuarters[] = {1, 2, 4, 8, 12, 16};

  int32_t count;  // splits
  int64_t time;   // in halves

  // `most`: splits that are considered.
  static SplitChoice make(const FwdProblem& problem, int32_t block_q, int32_t block_kv,
                          int64_t blocks_per_sm, int64_t most = kMaxSplits) {
    int64_t const slots = kMultiprocessors * blocks_per_sm;
    TileWork const work = TileWork::make(problem, block_q, block_kv);
    int64_t const units = work.tiles, blocks = work.most;
    int64_t const store = ceil_div(kStore * std::min(problem.queries.seqlen, block_q), block_q);
    bool const always_merges = needs_merge(problem);
    auto const time = [&](int64_t count) {
      bool const merges = count > 1 || always_merges;
      int64_t const start = merges ? kStart + store : kStart;
      int64_t const longest = ceil_div(blocks, count) + start, all = units * count;
      int64_t const merge = merges ? 2 * kMerge + count / kMergeSplits : 0;
      // Under a causal mask tiles with much work come first, so that blocks end together.
      int64_t const of_block = work.causal ? ceil_div(work.mean, count) + start : longest;
      int64_t const load = ceil_div(all, kMultiprocessors), rest = load % blocks_per_sm;
      int64_t const waves = load / blocks_per_sm * (blocks_per_sm + 1) + (rest > 0 ? rest + 1 : 0);
      return std::max(2 * longest, waves * of_block) + merge;  // waves: in halves
    };
    SplitChoice best{1, time(1)};
    for (int64_t const quarters : kQuarters) {
      // Not in less than a wave if blocks are made to share an SM: each would have one alone, and
      // no other block would hide its latency.
      if (units == 0 || (quarters < 4 && blocks_per_sm > 1)) continue;
      int64_t const fit = std::min({quarters * slots / (4 * units), blocks, most});
      if (fit < 2) continue;
      int64_t const count = ceil_div(blocks, ceil_div(blocks, fit));
      if (int64_t const of_count = time(count); of_count < best.time) {
        best = {static_cast<int32_t>(count), of_count};
      }
    }
    return best;
  }
};

// The splits' results in the workspace.
struct KeySplitsWorkspace {
  int64_t rows;    // of all split heads
  uint64_t bytes;  // 0: there are none

  KeySplitsWorkspace(const FwdProblem& problem, const SplitChoice& choice) {
    int64_t const queries = problem.queries.offsets != nullptr
                                ? problem.queries.total
                                : problem.batch * problem.queries.seqlen;
    bool const exist = choice.count > 1 || needs_merge(problem);
    rows = exist ? queries * problem.heads_q * choice.count : 0;
    bytes = static_cast<uint64_t>(rows) * (problem.head_dim_v + 1) * sizeof(float);
  }
  // Sets the splits of the problem. `start`: aligned to 16 bytes.
  void assign(FwdProblem& problem, const SplitChoice& choice, unsigned char* start) const {
    if (bytes == 0) return;
    problem.splits.count = choice.count;
    problem.splits.out = reinterpret_cast<float*>(start);
    problem.splits.lse = problem.splits.out + rows * problem.head_dim_v;
  }
};

}  // namespace flashvar::attention
