// The layout of the wgmma backward's workspace. Host only.
#pragma once
#include <cstdint>

#include "sm90/attention/bwd.cuh"
#include "sm90/attention/bwd_support.h"

namespace flashvar::sm90::attention {

// Offsets in bytes; lse_log2 is at 0.
template <class Config>
struct BwdWorkspace {
  uint64_t delta, grad_q_sum, counters, parts, end;
  SplitCounts splits;

  explicit BwdWorkspace(const BwdProblem& problem) {
    uint64_t const tiles = problem.queries.tiles(problem.batch, Config::kBlockQ) * problem.heads_q;
    uint64_t const rows = (tiles * Config::kRowBytes + 255) / 256 * 256;
    delta = rows;
    grad_q_sum = 2 * rows;
    counters =
        grad_q_sum + (sums_grad_q(problem) ? tiles * Config::kTileElements * sizeof(float) : 0);
    parts = counters + 256;
    splits = KeyTileChoice::make(problem, Config::kBlockQ, Config::kBlockKV, Config::kBlocksPerSM,
                                 Config::kDynamic)
                 .counts;
    end = parts + KeyTileSplitsWorkspace(problem, splits).bytes;
  }

  // Whether dQ is summed in the workspace.
  static bool sums_grad_q(const BwdProblem& problem) {
    return Config::kGradQ && !stores_grad_q<Config>(problem);
  }

  // Sets the kernels' pointers into the workspace.
  void set(BwdArgs& args) const {
    unsigned char* const start = args.problem.workspace;
    args.lse_log2 = reinterpret_cast<float*>(start);
    args.delta = reinterpret_cast<float*>(start + delta);
    args.grad_q_sum =
        sums_grad_q(args.problem) ? reinterpret_cast<float*>(start + grad_q_sum) : nullptr;
    args.stores_grad_q = stores_grad_q<Config>(args.problem);
    args.counters = reinterpret_cast<uint32_t*>(start + counters);
    args.splits = KeyTileSplitsWorkspace(args.problem, splits)
                      .splits(splits, start + parts, args.problem.head_dim);
  }
};

}  // namespace flashvar::sm90::attention
