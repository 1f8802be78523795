// Few kv heads (multi-query attention; grouped queries under tensor parallelism): their key tiles
// are fewer than SMs. The query heads of a group are then divided among `count` CTAs, each with its
// part of the sums dK and dV. These parts go to the workspace, in fp32, for bwd_sum_kernel. A
// "split head" is numbered kv head * count + part. Host only, but for GroupSplits.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/key_splits.h"
#include "attention/problem.h"
#include "core/divisor.h"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

struct GroupSplits {
  int32_t count = 1;
  Divisor by_count = Divisor::make(1);
  // [batch, split heads, seqlen_k, head_dim], or [split heads, total_k, head_dim].
  float* grad_k = nullptr;
  float* grad_v = nullptr;  // likewise, of head_dim_v
};

// The divisor of the group with the shortest estimated time, counted in steps, query blocks of one
// head and one key tile: a tile takes kStart beside its steps, one that stores a part kStore more,
// and the kernel that adds up the parts kSum, and 1 for kPartsPerStep tiles of parts. A larger
// number has to gain 3 %, because it takes memory.
inline int32_t count_group_splits(const BwdProblem& problem, int block_q, int block_kv) {
  constexpr int64_t kStart = 3, kStore = 4, kSum = 6, kPartsPerStep = 32;
  auto const tiles = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  int64_t const units =
      problem.keys.tiles(problem.batch, block_kv) * (problem.heads_q / problem.group);
  if (problem.group == 1 || units == 0 || units >= 4 * kMultiprocessors) return 1;
  int64_t visible = problem.queries.seqlen;
  bool const causal = problem.window_right != kUnbounded;
  if (causal && problem.window_left != kUnbounded) {
    visible = std::min(visible, int64_t{problem.window_left} + problem.window_right + block_kv);
  }
  int64_t const steps = tiles(visible, block_q);
  auto const time = [&](int64_t count) {
    int64_t const of_tile = steps * (problem.group / count) + kStart + (count > 1 ? kStore : 0);
    int64_t const all = units * count;
    // Under a causal mask tiles are taken in pairs, which have equal work, where they suffice.
    int64_t const rounds = causal && all > kMultiprocessors
                               ? std::max(of_tile, of_tile * all / (2 * kMultiprocessors))
                               : of_tile * tiles(all, kMultiprocessors);
    return rounds + (count > 1 ? kSum + all / kPartsPerStep : 0);
  };
  int32_t best = 1;
  int64_t best_time = time(1);
  for (int32_t count = 2; count <= problem.group; ++count) {
    if (problem.group % count != 0 || 100 * time(count) >= 97 * best_time) continue;
    best = count;
    best_time = time(count);
  }
  return best;
}

// The parts in the workspace.
struct GroupSplitsWorkspace {
  int64_t rows = 0;    // of all split heads
  uint64_t bytes = 0;  // 0: groups are not divided

  GroupSplitsWorkspace(const BwdProblem& problem, int32_t count) {
    if (count == 1) return;
    int64_t const keys =
        problem.keys.offsets != nullptr ? problem.keys.total : problem.batch * problem.keys.seqlen;
    rows = keys * (problem.heads_q / problem.group) * count;
    bytes = static_cast<uint64_t>(rows) * (problem.head_dim + problem.head_dim_v) * sizeof(float);
  }
  // `start`: aligned to 16 bytes.
  GroupSplits splits(int32_t count, unsigned char* start, int32_t head_dim) const {
    if (count == 1) return {};
    float* const grad_k = reinterpret_cast<float*>(start);
    return {count, Divisor::make(static_cast<uint32_t>(count)), grad_k, grad_k + rows * head_dim};
  }
};

}  // namespace flashvar::sm90::attention
