// Few key tiles: few kv heads (multi-query attention; grouped queries under tensor parallelism) or
// short keys (cross attention), in small batches. The work of a key tile is the query blocks of the
// heads of its group. It is then divided among `count` CTAs. Each computes its part of dK and dV,
// and stores it in the workspace, in fp32, for bwd_sum_kernel. A "split head" is numbered kv head *
// count + part. Host only, but for KeyTileSplits.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/key_splits.h"
#include "attention/problem.h"
#include "core/ceil_div.h"
#include "core/divisor.h"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

struct KeyTileSplits {
  int32_t count = 1;    // parts
  int32_t queries = 1;  // parts of a head's query blocks; count / queries: of the group's heads
  Divisor count_divisor = Divisor::make(1);
  Divisor queries_divisor = Divisor::make(1);
  // [batch, split heads, seqlen_k, head_dim], or [split heads, total_k, head_dim].
  float* grad_k = nullptr;
  float* grad_v = nullptr;  // likewise, of head_dim_v
};

// Into how many parts a tile's work is divided: the heads of its group, and their query blocks.
struct SplitCounts {
  int32_t heads = 1, queries = 1;
  int32_t parts() const { return heads * queries; }
};

// Rows of dK: keys of all sequences and kv heads.
inline int64_t key_rows(const BwdProblem& problem) {
  int64_t const keys =
      problem.keys.offsets != nullptr ? problem.keys.total : problem.batch * problem.keys.seqlen;
  return keys * (problem.heads_q / problem.group);
}

// What the dK and dV kernel has to do.
struct KeyTileWork {
  int64_t tiles;      // of all kv heads
  int64_t steps;      // query blocks of one head that the first tile of a sequence is visible to
  bool causal;        // other tiles see fewer
  int64_t group;      // query heads of a tile
  int64_t gradients;  // elements of dK and dV

  KeyTileWork(const BwdProblem& problem, int block_q, int block_kv)
      : tiles(problem.keys.tiles(problem.batch, block_kv) * (problem.heads_q / problem.group)),
        steps(problem.visible_query_blocks(block_q, block_kv)),
        causal(problem.window_right != kUnbounded),
        group(problem.group),
        gradients(key_rows(problem) * (problem.head_dim + problem.head_dim_v)) {}
};

// The estimated time of the dK and dV kernel and of bwd_sum_kernel, in 24ths of a step. A tile
// takes its steps and kStart. bwd_sum_kernel takes a step, a unit for each part of a tile, and a
// unit for kElements of all parts. Fitted to 240 calls on an H200, each with several numbers of
// parts (docs/hopper-ledger.md). `slots`: CTAs that run at the same time.
inline int64_t estimate_time(const KeyTileWork& work, const SplitCounts& counts, int64_t slots) {
  constexpr int64_t kUnits = 24, kStart = 5, kElements = 29'000;
  int64_t const parts = counts.parts(), ctas = work.tiles * parts;
  int64_t const steps = ceil_div(work.steps, counts.queries) * (work.group / counts.heads);
  int64_t const longest = kUnits * (steps + kStart);
  // Under a causal mask the mean tile has half of the steps, and CTAs take equal work.
  int64_t const mean = kUnits / 2 * (steps + 2 * kStart);
  int64_t const rounds =
      work.causal ? std::max(longest, mean * ctas / slots) : longest * ceil_div(ctas, slots);
  return rounds + (parts > 1 ? kUnits + parts + parts * work.gradients / kElements : 0);
}

// Into how many parts `heads` parts of each tile's heads divide their query blocks: as many as run
// at the same time.
inline int32_t count_query_parts(const KeyTileWork& work, int32_t heads, int64_t slots) {
  int64_t const of_tile = slots / (work.tiles * heads);
  if (of_tile < 2 || work.steps * slots > INT32_MAX) return 1;  // DynamicKeyTile::fill()
  return static_cast<int32_t>(ceil_div(work.steps, ceil_div(work.steps, of_tile)));
}

// The parts with the shortest estimated time, and that time.
struct KeyTileChoice {
  SplitCounts counts;
  int64_t time;  // estimate_time()

  // `divides_queries`: whether the kernel divides query blocks, as those with a dynamic schedule
  // do.
  static KeyTileChoice make(const BwdProblem& problem, int block_q, int block_kv, int ctas_per_sm,
                            bool divides_queries) {
    KeyTileWork const work(problem, block_q, block_kv);
    int64_t const slots = ctas_per_sm * kMultiprocessors;
    KeyTileChoice best{{}, estimate_time(work, {}, slots)};
    if (work.tiles == 0 || work.steps == 0 || work.tiles >= 4 * kMultiprocessors) return best;
    auto const consider = [&](const SplitCounts& counts) {
      int64_t const time = estimate_time(work, counts, slots);
      if (time < best.time) best = {counts, time};
    };
    for (int32_t heads = problem.group; heads > 0; --heads) {
      if (problem.group % heads != 0) continue;
      consider({heads, 1});
      int32_t const queries = divides_queries ? count_query_parts(work, heads, slots) : 1;
      if (queries > 1) consider({heads, queries});
    }
    return best;
  }
};

// The parts in the workspace.
struct KeyTileSplitsWorkspace {
  int64_t rows = 0;    // of all split heads
  uint64_t bytes = 0;  // 0: nothing is divided

  KeyTileSplitsWorkspace(const BwdProblem& problem, const SplitCounts& counts) {
    if (counts.parts() == 1) return;
    rows = key_rows(problem) * counts.parts();
    bytes = static_cast<uint64_t>(rows) * (problem.head_dim + problem.head_dim_v) * sizeof(float);
  }
  // `start`: aligned to 16 bytes.
  KeyTileSplits splits(const SplitCounts& counts, unsigned char* start, int32_t head_dim) const {
    if (counts.parts() == 1) return {};
    KeyTileSplits splits;
    splits.count = counts.parts();
    splits.queries = counts.queries;
    splits.count_divisor = Divisor::make(static_cast<uint32_t>(splits.count));
    splits.queries_divisor = Divisor::make(static_cast<uint32_t>(splits.queries));
    splits.grad_k = reinterpret_cast<float*>(start);
    splits.grad_v = splits.grad_k + rows * head_dim;
    return splits;
  }
};

}  // namespace flashvar::sm90::attention
