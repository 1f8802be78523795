// How many splits the forward for few rows takes, where they are merged, and how its blocks share
// the SMs. Host only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/key_splits.h"
#include "core/ceil_div.h"
#include "sm90/attention/fwd_few_config.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

struct FewSplits {
  // With more tiles most SMs have one (choose_of_many).
  static constexpr int64_t kMostTiles = 100;
  // The blocks of a cluster are in one GPC. With more of them in all, some SMs would be idle while
  // others have two clusters one after the other.
  static constexpr int64_t kMostInClusters = 100;
  static constexpr int64_t kMostBlocks = 2 * kMultiprocessors;

  int32_t count;
  bool in_cluster;  // the splits of a tile are a cluster, which merges them

  // The splits of the shortest estimated time. Nanoseconds, fitted to 2,600 times of an H200 with 1
  // to 32 splits (docs/hopper-ledger.md, "A kernel for few rows").
  template <class Config>
  static FewSplits choose(const FwdProblem& problem) {
    // Of a block alone on its SM. With 32 rows two warps read the same keys.
    constexpr int64_t kReads = int64_t{Config::kStageBytes} * kFewWarps / Config::kKeyWarps;
    constexpr int64_t kStep = 400 + 4 * kReads / 1024;
    int64_t const tiles = problem.batch * problem.heads_q;
    if (tiles == 0) return {1, false};
    int64_t const keys = visible_keys(problem, Config::kBlockQ);
    int64_t const steps = ceil_div(keys, Config::kBlockKV);
    int64_t const bytes = tiles * keys * 2 * (problem.head_dim + problem.head_dim_v);
    if (tiles > kMostTiles) {
      return {can_merge(problem) ? choose_of_many<Config>(tiles, steps, kStep, bytes) : 1, false};
    }
    int64_t const memory = 3 * bytes / 10000;  // 3.3 TB/s
    FewSplits best{1, false};
    int64_t shortest = std::max(steps * kStep, memory) + best.merge_time();
    int64_t const most = std::min({steps, kMaxSplits, kMostBlocks / tiles});
    for (int64_t fit = 2; fit <= most; ++fit) {
      int64_t const longest = ceil_div(steps, fit), count = ceil_div(steps, longest);
      if (count < fit) continue;  // the same splits as for an earlier `fit`
      FewSplits const choice{static_cast<int32_t>(count), fits_cluster(tiles, count)};
      if (!choice.in_cluster && !can_merge(problem)) break;
      int64_t const time = std::max(longest * kStep, memory) + choice.merge_time();
      if (time < shortest) {
        shortest = time;
        best = choice;
      }
      if (longest * kStep <= memory) break;  // more splits only take longer to merge
    }
    return best;
  }

  // Whether fwd_merge_kernel stores the results.
  bool has_merge() const { return !in_cluster && count > 1; }

  uint64_t workspace(const FwdProblem& problem) const {
    return has_merge() ? KeySplitsWorkspace(problem, {count, 0}).bytes : 0;
  }

  // Sets the splits of the problem. `start`: of the workspace.
  void assign(FwdProblem& problem, unsigned char* start) const {
    problem.splits.count = count;
    if (has_merge()) {
      KeySplitsWorkspace(problem, {count, 0}).assign(problem, {count, 0}, start);
    }
  }

 private:
  // fwd_merge_kernel does not find the rows of several varlen queries after PackGQA.
  static bool can_merge(const FwdProblem& problem) {
    return problem.queries.offsets == nullptr || problem.splits.row_shift == 0;
  }

  // The number of splits with more tiles than kMostTiles. Splits gain where few tiles are left for
  // the last wave, and where blocks compute longer than their keys take to load and share SMs
  // unevenly. `step`: nanoseconds of a step of a block alone on its SM; `bytes`: of K and V. Fitted
  // to 1,500 times of an H200, of 101 to 420 tiles (docs/hopper-ledger.md, "A kernel for few
  // rows").
  template <class Config>
  static int32_t choose_of_many(int64_t tiles, int64_t steps, int64_t step, int64_t bytes) {
    // The most splits; nanoseconds of the merge of a call, and of the start of a block.
    constexpr int64_t kMost = 6, kMerge = 10000, kStart = 3000;
    // Of a block's time, where one, two or three share an SM.
    constexpr int64_t kPercent[] = {110, 150, 175};
    constexpr int64_t kSlots = Config::kBlocksPerSM * kMultiprocessors;
    auto const time = [&](int64_t count, int64_t longest) {
      int64_t const blocks = tiles * count, waves = blocks / kSlots, rest = blocks % kSlots;
      auto const of_wave = [&](int64_t running) {
        int64_t const sharing = std::max<int64_t>(ceil_div(running, kMultiprocessors), 1);
        // 3.6 TB/s
        return std::max((longest * step + kStart) * kPercent[sharing - 1] / 100,
                        bytes / blocks * running / 3600);
      };
      return waves * of_wave(kSlots) + (rest > 0 ? of_wave(rest) : 0) + (count > 1 ? kMerge : 0);
    };
    int64_t best = 1, shortest = time(1, steps);
    for (int64_t count = 2; count <= std::min(kMost, steps); ++count) {
      int64_t const longest = ceil_div(steps, count);
      if (ceil_div(steps, longest) < count) continue;  // as for fewer splits
      int64_t const found = time(count, longest);
      if (100 * found >= 97 * shortest) continue;  // the estimate is not that exact
      shortest = found;
      best = count;
    }
    return static_cast<int32_t>(best);
  }

  static bool fits_cluster(int64_t tiles, int64_t count) {
    return count <= kMaxCluster && tiles * count <= kMostInClusters;
  }

  int64_t merge_time() const { return in_cluster ? 1400 : has_merge() ? 2500 + 10 * count : 0; }
};

// How the blocks of a launch share the SMs.
struct FewSharing {
  int blocks_per_sm;
  int stages;  // buffers of K, and of V, in each block

  // Blocks share SMs where they are more than SMs, so that their latencies overlap. Where all that
  // run have more than about 10 MB of loads in flight, memory is slower.
  template <class Config>
  static FewSharing choose(int64_t blocks, int multiprocessors) {
    constexpr int64_t kInFlight = 10 << 20;
    int64_t const per_sm =
        std::clamp<int64_t>(ceil_div(blocks, int64_t{multiprocessors}), 1, Config::kBlocksPerSM);
    int64_t const running = std::min(blocks, per_sm * multiprocessors);
    int64_t const wanted = kInFlight / (std::max<int64_t>(running, 1) * Config::kStageBytes);
    // With one stage a block waits for each load; others of the SM compute meanwhile.
    int64_t const fewest = per_sm > 1 ? 1 : 2;
    int64_t const most = Config::stages_that_fit(static_cast<int>(per_sm));
    return {static_cast<int>(per_sm), static_cast<int>(std::clamp(wanted, fewest, most))};
  }
};

}  // namespace flashvar::sm90::attention
