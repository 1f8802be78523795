// How the backward is divided: tiles, parts of their work, and the layout of the workspace. Host
// only.
#pragma once
#include <algorithm>

#include "sm80/attention/bwd.cuh"
#include "sm80/attention/key_tile_splits.h"

namespace flashvar::sm80::attention {

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
  args.head_parts = args.query_parts = 1;
  int64_t const blocks = std::max<int64_t>(args.key_tiles * heads_kv, 1);
  if (!problem.deterministic) {
    args.head_parts = count_head_parts(blocks, problem.group);
    bool const causal = problem.window_right != kUnbounded && problem.window_left == kUnbounded;
    args.query_parts = count_query_parts(
        blocks * args.head_parts, problem.visible_query_blocks(Config::kBlockQ, Config::kBlockKV),
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
  bool const sums_grad_kv = args.head_parts * args.query_parts > 1;
  args.grad_k_sum = allocate(sums_grad_kv, tiles_k * Config::GradK::kElements);
  args.grad_v_sum = allocate(sums_grad_kv, tiles_k * Config::GradV::kElements);
  return {sums_begin, end};
}

}  // namespace flashvar::sm80::attention
