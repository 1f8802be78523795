// How the backward is divided: tiles, splits of a group and of a head's queries, and the layout of
// the workspace. Host only.
#pragma once
#include <algorithm>

#include "attention/key_splits.h"
#include "sm80/attention/bwd.cuh"

namespace flashvar::sm80::attention {

// The query heads of a group are split over several blocks where there would be fewer blocks than
// this: eight per SM, because blocks differ in work under a mask.
inline constexpr int64_t kEnoughBlocks = 8 * kMultiprocessors;

// The parts of a head's query blocks, where `blocks` key tiles, with the same heads each, do not
// fill the device. `steps`: query blocks that a tile sees at most. Fitted to calls measured on 9.0
// (docs/hopper-ledger.md): adding the parts, and two more kernels, take as long as a few steps.
//
// Under a causal mask tiles differ in work, and all start at once: more and smaller blocks fill
// the time at the end. Otherwise only where the parts, too, run at the same time.
inline int32_t count_query_splits(int64_t blocks, int64_t steps, bool causal, int blocks_per_sm) {
  constexpr int64_t kFewestSaved = 4, kFewestSteps = 2;
  constexpr int64_t kBalancing = 4, kCausalBlocks = 3 * kMultiprocessors;
  int64_t parts = 1;
  if (causal) {
    int64_t const most = std::min(kEnoughBlocks / blocks, steps / kFewestSteps);
    parts = std::min(std::max(kBalancing, kCausalBlocks / blocks), most);
  } else if (2 * blocks <= kMultiprocessors) {
    int64_t const filling = blocks_per_sm * kMultiprocessors / blocks;
    int64_t const of_part = (steps + filling - 1) / filling;
    if (steps - of_part >= kFewestSaved) parts = (steps + of_part - 1) / of_part;
  }
  return static_cast<int32_t>(std::max(parts, int64_t{1}));
}

// Offsets in the workspace, in bytes. The sums, [sums_begin, end), are zeroed before the main
// kernel.
struct BwdWorkspace {
  uint64_t sums_begin, end;
};

// Fills `args` with the problem, tile numbers and pointers into the workspace.
template <class Config>
BwdWorkspace plan_bwd(const BwdProblem& problem, BwdArgs& args) {
  static_cast<BwdProblem&>(args) = problem;
  int64_t const heads_kv = problem.heads_q / problem.group;
  args.query_tiles = problem.queries.tiles(problem.batch, Config::kBlockQ);
  args.key_tiles = problem.keys.tiles(problem.batch, Config::kBlockKV);
  args.splits = args.query_splits = 1;
  int64_t const blocks = std::max<int64_t>(args.key_tiles * heads_kv, 1);
  if (!problem.deterministic) {
    args.splits = static_cast<int32_t>(
        std::min<int64_t>(problem.group, (kEnoughBlocks + blocks - 1) / blocks));
    while (problem.group % args.splits != 0) ++args.splits;
    bool const causal = problem.window_right != kUnbounded && problem.window_left == kUnbounded;
    args.query_splits = count_query_splits(
        blocks * args.splits, problem.visible_query_blocks(Config::kBlockQ, Config::kBlockKV),
        causal, Config::kBlocksPerSM);
  }
  uint64_t end = 0;
  auto allocate = [&](bool wanted, int64_t elements) -> float* {
    if (!wanted) return nullptr;
    unsigned char* const part = problem.workspace + end;
    end += (elements * sizeof(float) + 255) / 256 * 256;
    return reinterpret_cast<float*>(part);
  };
  int64_t const tiles_q = problem.heads_q * args.query_tiles;
  int64_t const tiles_k = heads_kv * args.key_tiles;
  args.lse_log2 = allocate(true, tiles_q * Config::kBlockQ);
  args.delta = allocate(true, tiles_q * Config::kBlockQ);
  uint64_t const sums_begin = end;
  args.one_key_tile = problem.has_one_key_tile(Config::kBlockKV);
  args.grad_q_sum =
      allocate(!problem.deterministic && !args.one_key_tile, tiles_q * Config::GradQ::kElements);
  bool const sums_grad_kv = args.splits * args.query_splits > 1;
  args.grad_k_sum = allocate(sums_grad_kv, tiles_k * Config::GradK::kElements);
  args.grad_v_sum = allocate(sums_grad_kv, tiles_k * Config::GradV::kElements);
  return {sums_begin, end};
}

}  // namespace flashvar::sm80::attention
