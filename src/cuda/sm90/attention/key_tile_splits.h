// Few key tiles: few kv heads (multi-query attention; grouped queries under tensor parallelism) or
// short keys (cross attention), in small batches. The work of a key tile is the query blocks of the
// heads of its group. It is then divided into parts, one for each of several CTAs. A CTA stores its
// part of dK and dV in the workspace, in fp32, for bwd_sum_kernel. A "split head" is numbered kv
// head * parts + part. Host only, but for KeyTileSplits.
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
  int32_t count = 1;    // parts of a tile
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

// Whether all sequences have one length: packed ones are then as good as a batch.
inline bool have_one_length(const Sequences& sequences, int64_t batch) {
  return sequences.offsets == nullptr || sequences.total == batch * sequences.seqlen;
}

// Keys of all sequences and kv heads.
inline int64_t count_grad_rows(const BwdProblem& problem) {
  int64_t const keys =
      problem.keys.offsets != nullptr ? problem.keys.total : problem.batch * problem.keys.seqlen;
  return keys * (problem.heads_q / problem.group);
}

// The queries that a key sees under a causal mask, on average. From key `first` on some are hidden,
// from `last` on all.
inline int64_t mean_visible_queries(const BwdProblem& problem) {
  int64_t const queries = problem.queries.seqlen, keys = problem.keys.seqlen;
  int64_t const shift = queries - keys - problem.window_right;
  int64_t const first = std::clamp(-shift, int64_t{0}, keys);
  int64_t const last = std::clamp(queries - shift, first, keys);
  int64_t const hidden =
      (last - first) * (first + last - 1 + 2 * shift) / 2 + (keys - last) * queries;
  return queries - hidden / std::max(keys, int64_t{1});
}

// What the dK and dV kernel has to do.
struct KeyTileWork {
  static constexpr int64_t kStep = 24;  // the time of a step, in units of all times here

  int64_t tiles;      // of all kv heads
  int64_t steps;      // query blocks of one head that a tile sees at most
  int64_t mean_time;  // of the query blocks of one head that a tile sees on average
  bool causal;        // tiles differ in work, and CTAs take equal work
  int64_t group;      // query heads of a tile
  int64_t gradients;  // elements of dK and dV

  KeyTileWork(const BwdProblem& problem, int block_q, int block_kv)
      : steps(problem.visible_query_blocks(block_q, block_kv)),
        causal(problem.window_right != kUnbounded && problem.window_left == kUnbounded),
        group(problem.group),
        gradients(count_grad_rows(problem) * (problem.head_dim + problem.head_dim_v)) {
    bool const is_batch = have_one_length(problem.keys, problem.batch);
    int64_t const of_head = is_batch
                                ? problem.batch * ceil_div(int64_t{problem.keys.seqlen}, block_kv)
                                : problem.keys.tiles(problem.batch, block_kv);
    tiles = of_head * (problem.heads_q / problem.group);
    mean_time = causal ? kStep * mean_visible_queries(problem) / block_q : kStep * steps;
  }
};

// The estimated time of the dK and dV kernel and of bwd_sum_kernel. A CTA takes its steps and
// kStart. bwd_sum_kernel takes one step, one unit per part, and one unit per kElements floats of
// all parts. Fitted to 240 calls on an H200, each with several numbers of parts
// (docs/hopper-ledger.md). `slots`: CTAs that run at the same time.
inline int64_t estimate_time(const KeyTileWork& work, const SplitCounts& counts, int64_t slots) {
  constexpr int64_t kStep = KeyTileWork::kStep, kStart = 5 * kStep, kElements = 29'000;
  int64_t const parts = counts.parts(), ctas = work.tiles * parts;
  int64_t const heads = work.group / counts.heads;
  int64_t const longest = kStep * ceil_div(work.steps, counts.queries) * heads + kStart;
  int64_t const mean = work.mean_time * heads / counts.queries + kStart;
  int64_t const rounds =
      work.causal ? std::max(longest, mean * ctas / slots) : longest * ceil_div(ctas, slots);
  return rounds + (parts > 1 ? kStep + parts + parts * work.gradients / kElements : 0);
}

// Into how many parts `heads` parts of each tile's heads divide their query blocks: as many as run
// at the same time.
inline int32_t count_query_parts(const KeyTileWork& work, int32_t heads, int64_t slots) {
  int64_t const of_tile = slots / (work.tiles * heads);
  if (of_tile < 2) return 1;
  if ((work.steps + 1) * slots > INT32_MAX) return 1;  // for DynamicKeyTile::fill()
  return static_cast<int32_t>(ceil_div(work.steps, ceil_div(work.steps, of_tile)));
}

// The parts with the shortest estimated time, and that time. They must gain 3 %, because they take
// memory.
struct KeyTileChoice {
  SplitCounts counts;
  int64_t time;  // estimate_time()

  // `divides_queries`: whether the kernel divides query blocks, as those with a dynamic schedule
  // do.
  static KeyTileChoice make(const BwdProblem& problem, int block_q, int block_kv, int ctas_per_sm,
                            bool divides_queries) {
    KeyTileWork const work(problem, block_q, block_kv);
    int64_t const slots = ctas_per_sm * kMultiprocessors;
    KeyTileChoice const whole{{}, estimate_time(work, {}, slots)};
    if (work.tiles == 0 || work.steps == 0 || work.tiles >= 4 * kMultiprocessors) return whole;
    KeyTileChoice best = whole;
    auto const consider = [&](const SplitCounts& counts) {
      int64_t const time = estimate_time(work, counts, slots);
      if (time < best.time) best = {counts, time};
    };
    // Parts of the group first: of equal times theirs is taken, because tiles under a causal mask
    // stay in pairs.
    for (int32_t heads = problem.group; heads > 0; --heads) {
      if (problem.group % heads != 0) continue;
      consider({heads, 1});
      int32_t const queries = divides_queries ? count_query_parts(work, heads, slots) : 1;
      if (queries > 1) consider({heads, queries});
    }
    return 100 * best.time < 97 * whole.time ? best : whole;
  }
};

// The parts in the workspace.
struct KeyTileSplitsWorkspace {
  int64_t rows = 0;    // of all split heads
  uint64_t bytes = 0;  // 0: nothing is divided

  KeyTileSplitsWorkspace(const BwdProblem& problem, const SplitCounts& counts) {
    if (counts.parts() == 1) return;
    rows = count_grad_rows(problem) * counts.parts();
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
