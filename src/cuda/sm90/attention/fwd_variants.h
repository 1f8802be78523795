// Which variant of the wgmma forward computes a call: the one with the shortest estimated time.
// Host only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/key_splits.h"
#include "core/ceil_div.h"
#include "sm90/attention/fwd_config.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// Problems are simplified (key_splits.h).
template <class Target, class Dtype, int kHeadDim, int kHeadDimV>
struct FwdVariants {
  template <FwdVariant kVariant>
  using Config = FwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kVariant>;
  using General = Config<FwdVariant::kGeneral>;
  using Medium = Config<FwdVariant::kMedium>;
  using Small = Config<FwdVariant::kSmall>;
  using Split = Config<FwdVariant::kSplit>;
  using SmallSplit = Config<FwdVariant::kSmallSplit>;
  using Modifiers = Config<FwdVariant::kModifiers>;
  using SmallModifiers = Config<FwdVariant::kSmallModifiers>;
  static constexpr bool has_tile(FwdVariant variant) {
    return fwd_tile(variant, kHeadDim, kHeadDimV).variant == variant;
  }
  static constexpr bool kHasSmaller = has_tile(FwdVariant::kSmall);
  static_assert(kHasSmaller == has_tile(FwdVariant::kMedium) &&
                kHasSmaller == has_tile(FwdVariant::kSmallSplit) &&
                kHasSmaller == has_tile(FwdVariant::kSmallModifiers));

  // Calls `use` with the configuration of the call's variant.
  template <class Use>
  static auto with_config(const FwdProblem& problem, Use&& use) {
    if constexpr (kHasSmaller) {
      if (problem.has_modifiers()) {
        return time_small<SmallModifiers>(problem) < time<Modifiers>(problem)
                   ? use(SmallModifiers{})
                   : use(Modifiers{});
      }
      bool const is_medium = prefers_medium(problem);
      int64_t const larger = is_medium ? time<Medium>(problem) : time<General>(problem);
      int64_t const small = time_small<Small>(problem), whole = std::min(small, larger);
      // Calls of few rows prefer small tiles. They take large ones only where small ones would have
      // one split.
      bool const fits_small = problem.queries.seqlen <= SmallSplit::kBlockQ;
      if (fits_small && prefers_split<SmallSplit>(problem, whole)) return use(SmallSplit{});
      if (prefers_split<Split>(problem, whole)) return use(Split{});
      if (small < larger) return use(Small{});
      return is_medium ? use(Medium{}) : use(General{});
    } else {
      if (problem.has_modifiers()) return use(Modifiers{});
      return prefers_split<Split>(problem, time<General>(problem)) ? use(Split{}) : use(General{});
    }
  }

  // Rather than kGeneral. Larger tiles have more rows beyond the last query, more hidden keys under
  // a mask, and may leave more SMs idle in the last round.
  static bool prefers_medium(const FwdProblem& problem) {
    // Causal calls with at most so many keys go by the estimated times, as calls without a mask do.
    constexpr int kEstimated = kHeadDim <= 64 ? 0 : 512;
    if (problem.window_left != kUnbounded) return true;
    if (problem.window_right != kUnbounded && problem.keys.seqlen > kEstimated) {
      return problem.keys.seqlen <= Medium::kTile.max_keys_right_window;
    }
    return time<Medium>(problem) <= time<General>(problem);
  }

  // `time_whole`: with one split.
  template <class C>
  static bool prefers_split(const FwdProblem& problem, int64_t time_whole) {
    SplitChoice const choice = choose_splits<C>(problem);
    return needs_merge(problem) || (choice.count > 1 && time<C>(problem) < time_whole);
  }

  // Estimated time. Unit: 1/200 of the time for one score (query x key) in a tile of cost 100.
  template <class C>
  static int64_t time(const FwdProblem& problem) {
    return choose_splits<C>(problem).time * area_cost<C>();
  }

  // Of a variant of which several blocks share an SM. A block reads K and V for the queries of its
  // tile alone: with more queries and keys the L2 cache would be the limit.
  template <class C>
  static int64_t time_small(const FwdProblem& problem) {
    constexpr int64_t kMostKeys = 1024;
    int64_t const keys = visible_keys(problem, C::kBlockQ);
    bool const one_tile = problem.queries.seqlen <= C::kBlockQ;
    if (!one_tile && keys > kMostKeys) return INT64_MAX;
    // Lower bound: a CTA that is alone on its SM takes as long as kBlocksPerSM that share it,
    // because its latencies are not overlapped. Not applied to calls of one tile whose V may have a
    // tail that must be zeroed: there larger tiles lose time too, with warpgroups without rows
    // (fwd_consume).
    int64_t const steps = ceil_div(keys, C::kBlockKV) + SplitChoice::kStart;
    int64_t const alone =
        one_tile && problem.has_foreign_tail() ? 0 : (C::kBlocksPerSM + 1) * steps;
    return std::max(choose_splits<C>(problem).time, alone) * area_cost<C>();
  }

  template <class C>
  static constexpr int64_t area_cost() {
    return int64_t{C::kBlockQ} * C::kBlockKV * C::kTile.cost;
  }

  template <class C>
  static SplitChoice choose_splits(const FwdProblem& problem) {
    return SplitChoice::make(problem, C::kBlockQ, C::kBlockKV, C::kBlocksPerSM,
                             C::kSplits ? kMaxSplits : 1);
  }
};

}  // namespace flashvar::sm90::attention
