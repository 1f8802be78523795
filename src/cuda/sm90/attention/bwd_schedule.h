// The schedule of the dK and dV kernel: what a work unit is, and how many CTAs take them
// (key_tile.cuh, bwd_dynamic.cuh). Host only.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>

#include "attention/problem.h"
#include "sm90/attention/bwd_support.h"
#include "sm90/attention/key_tile.cuh"

namespace flashvar::sm90::attention {

// Sets the arguments of the dK and dV kernel: its group, and work units, which are tiles of split
// heads (KeyTileSplits). Returns the number of CTAs, or none where unit numbers do not fit 31 bits.
template <class Config>
std::optional<int64_t> init_key_schedule(BwdArgs& args, int multiprocessors) {
  args.problem.group /= args.splits.count / args.splits.queries;
  const BwdProblem& problem = args.problem;
  bool const varlen = problem.keys.offsets != nullptr;
  int64_t const heads = (varlen ? 1 : problem.batch) * args.split_heads();
  int64_t const tiles = problem.keys.tiles(varlen ? problem.batch : 1, Config::kBlockKV);
  args.heads_outermost = has_short_windows(problem);
  args.paired =
      !Config::kDynamic && problem.window_right != kUnbounded && heads * tiles > multiprocessors;
  int64_t const units_per_head = args.paired ? (tiles + 1) / 2 : tiles;
  if (heads * units_per_head > INT32_MAX) return std::nullopt;
  args.units_per_head = static_cast<uint32_t>(units_per_head);
  args.work_units = static_cast<uint32_t>(heads * units_per_head);
  auto const most = static_cast<uint32_t>(Config::kBlocksPerSM * multiprocessors);
  auto const rows = static_cast<uint32_t>(heads), tiles_per_row = static_cast<uint32_t>(tiles);
  uint32_t ctas = std::min(args.work_units, most);
  if (args.paired) {
    if (Config::kBlocksPerSM == 1) {
      ctas = PairSchedule::balanced_ctas(args.work_units, rows, tiles_per_row, most);
    }
    args.pairs = PairSchedule::make(args.work_units, rows, tiles_per_row, ctas);
  }
  return ctas;
}

}  // namespace flashvar::sm90::attention
