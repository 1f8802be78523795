// Which variant of the wgmma forward computes a call: the one with the shortest estimated time.
// Host only.
#pragma once
#include <cstdint>

#include "attention/key_splits.h"
#include "sm90/attention/fwd_config.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// Problems are simplified (key_splits.h).
template <class Target, class Dtype, int kHeadDim, int kHeadDimV>
struct FwdVariants {
  template <FwdVariant kVariant>
  using Config = FwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kVariant>;
  using General = Config<FwdVariant::kGeneral>;
  using Short = Config<FwdVariant::kShort>;
  using Split = Config<FwdVariant::kSplit>;
  static constexpr bool kHasShort = Short::kTile.variant == FwdVariant::kShort;

  // Calls `use` with the configuration of the call's variant.
  template <class Use>
  static auto with_config(const FwdProblem& problem, Use&& use) {
    if (problem.has_modifiers()) return use(Config<FwdVariant::kModifiers>{});
    bool const is_short = prefers_short(problem);
    if (prefers_split(problem, is_short ? time<Short>(problem) : time<General>(problem))) {
      return use(Split{});
    }
    if constexpr (kHasShort) {
      if (is_short) return use(Short{});
    }
    return use(General{});
  }

  // Larger tiles have more rows beyond the last query, more hidden keys under a mask, and may leave
  // more SMs idle in the last round.
  static bool prefers_short(const FwdProblem& problem) {
    if (!kHasShort) return false;
    if (problem.window_left != kUnbounded) return true;
    if (problem.window_right != kUnbounded) return problem.keys.seqlen <= Short::kTile.causal_keys;
    return time<Short>(problem) <= time<General>(problem);
  }

  // `time_whole`: without divided keys.
  static bool prefers_split(const FwdProblem& problem, int64_t time_whole) {
    KeyDivision const division = divide_keys<Split>(problem);
    return needs_merge(problem) || (division.count > 1 && time<Split>(problem) < time_whole);
  }

  // Estimated, in half percent of the time that an SM needs for a query and a key.
  template <class C>
  static int64_t time(const FwdProblem& problem) {
    return divide_keys<C>(problem).time * C::kBlockQ * C::kBlockKV * C::kTile.cost;
  }

  template <class C>
  static KeyDivision divide_keys(const FwdProblem& problem) {
    return KeyDivision::make(problem, C::kBlockQ, C::kBlockKV, 1, C::kSplits ? kMaxSplits : 1);
  }
};

}  // namespace flashvar::sm90::attention
