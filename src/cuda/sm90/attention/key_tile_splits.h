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

// The key tiles of a backward, and how many query blocks the first tile of a sequence is visible
// to.
struct KeyTileWork {
  int64_t tiles;  // of all kv heads
  int64_t steps;  // query blocks of one head
  bool causal;    // other tiles see fewer

  KeyTileWork(const BwdProblem& problem, int block_q, int block_kv)
      : tiles(problem.keys.tiles(problem.batch, block_kv) * (problem.heads_q / problem.group)),
        steps(problem.visible_query_blocks(block_q, block_kv)),
        causal(problem.window_right != kUnbounded) {}
};

// Into how many parts the `group` query heads of a key tile are divided: the divisor of `group`
// with the shortest estimated time. Times are counted in steps: a tile takes its steps and kStart,
// and kStore more if it stores a part. The kernel that adds up the parts takes kSum, and 1 for
// every kPartsPerStep parts of tiles. A larger number has to gain 3 %, because it takes memory.
inline int32_t count_head_parts(const KeyTileWork& work, int32_t group) {
  constexpr int64_t kStart = 3, kStore = 4, kSum = 6, kPartsPerStep = 32;
  if (group == 1 || work.tiles == 0 || work.tiles >= 4 * kMultiprocessors) return 1;
  auto const time = [&](int64_t count) {
    int64_t const of_tile = work.steps * (group / count) + kStart + (count > 1 ? kStore : 0);
    int64_t const all = work.tiles * count;
    // Under a causal mask tiles are taken in pairs, which have equal work, where they suffice.
    int64_t const rounds = work.causal && all > kMultiprocessors
                               ? std::max(of_tile, of_tile * all / (2 * kMultiprocessors))
                               : of_tile * ceil_div(all, kMultiprocessors);
    return rounds + (count > 1 ? kSum + all / kPartsPerStep : 0);
  };
  int32_t best = 1;
  int64_t best_time = time(1);
  for (int32_t count = 2; count <= group; ++count) {
    if (group % count != 0 || 100 * time(count) >= 97 * best_time) continue;
    best = count;
    best_time = time(count);
  }
  return best;
}

// Into how many parts the query blocks of a head are divided: as many as run at the same time,
// because the start of another CTA takes longer than some steps. `tiles`: key tiles, each with the
// same heads; `slots`: CTAs that run at the same time. Parts must save kFewestSaved steps, which
// storing and adding them take; under a causal mask, where the mean tile has half of the steps,
// twice as many.
inline int32_t count_query_parts(const KeyTileWork& work, int64_t tiles, int64_t slots) {
  constexpr int64_t kFewestSaved = 3;
  if (tiles == 0 || 2 * tiles > slots) return 1;
  if (work.steps * slots > INT32_MAX) return 1;  // for DynamicKeyTile::fill()
  int64_t const of_part = ceil_div(work.steps, slots / tiles);
  if (work.steps - of_part < kFewestSaved * (work.causal ? 2 : 1)) return 1;
  return static_cast<int32_t>(ceil_div(work.steps, of_part));
}

// `divides_queries`: whether the kernel divides query blocks, as those with a dynamic schedule do.
inline SplitCounts count_key_tile_splits(const BwdProblem& problem, int block_q, int block_kv,
                                         int ctas_per_sm, bool divides_queries) {
  KeyTileWork const work(problem, block_q, block_kv);
  int32_t const heads = count_head_parts(work, problem.group);
  if (!divides_queries) return {heads, 1};
  return {heads, count_query_parts(work, work.tiles * heads, ctas_per_sm * kMultiprocessors)};
}

// The parts in the workspace.
struct KeyTileSplitsWorkspace {
  int64_t rows = 0;    // of all split heads
  uint64_t bytes = 0;  // 0: nothing is divided

  KeyTileSplitsWorkspace(const BwdProblem& problem, const SplitCounts& counts) {
    if (counts.parts() == 1) return;
    int64_t const keys =
        problem.keys.offsets != nullptr ? problem.keys.total : problem.batch * problem.keys.seqlen;
    rows = keys * (problem.heads_q / problem.group) * counts.parts();
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
