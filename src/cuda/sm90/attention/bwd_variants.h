// Which variant of the wgmma backward computes a call. Host only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "sm90/attention/bwd_config.cuh"
#include "sm90/attention/bwd_support.h"
#include "sm90/attention/key_tile_splits.h"

namespace flashvar::sm90::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV>
struct BwdVariants {
  template <unsigned kVariant>
  using Config = BwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kVariant>;
  using Dense = Config<BwdVariant::kDense>;
  static constexpr bool kHasSmall = small_bwd_tile(Dense::kLargest).max_head_dim > 0;

  // Calls `use` with the configuration of the call's variant.
  template <class Use>
  static auto with_config(const BwdProblem& problem, Use&& use) {
    using V = BwdVariant;
    if constexpr (kHasSmall) {
      if (prefers_small(problem)) {
        return choose<V::kSmall>(problem, use);
      }
    }
    if constexpr (Dense::kGradQ) {
      bool const stores = choose<V::kDense, V::kOneKeyTile>(
          problem, [&](auto config) { return stores_grad_q<decltype(config)>(problem); });
      if (stores) return choose<V::kDense, V::kOneKeyTile>(problem, use);
      if (problem.deterministic) return choose<V::kNoDq>(problem, use);
    }
    return takes_varlen_kernel(problem) ? choose<V::kDense, V::kVarlen>(problem, use)
                                        : choose<V::kDense>(problem, use);
  }

  // Whether the call has small tiles, if the head dims have them. Measured on an H200
  // (docs/hopper-ledger.md).
  static bool prefers_small(const BwdProblem& problem) {
    using Small = Config<BwdVariant::kSmall>;
    constexpr int kMostKeys = 1024;
    static_assert(Small::kBlockKV == kSmallBlockKV);
    // A tile that has all keys of its sequence stores dQ. That is best, in a small tile if it fits.
    if (stores_grad_q<Small>(problem)) return true;
    if (problem.has_one_key_tile(Dense::kBlockKV) || problem.keys.seqlen > kMostKeys) return false;
    if (Dense::kLargest > 96 || problem.deterministic) return false;
    if (!have_one_length(problem.queries, problem.batch) ||
        !have_one_length(problem.keys, problem.batch)) {
      return 8 * mean_area<Dense>(problem) >= 9 * mean_area<Small>(problem);
    }
    // The time of a step of small tiles, in percent of one of larger tiles.
    constexpr int64_t kStepTime = Dense::kLargest <= 64 ? 80 : 110;
    return kStepTime * choose_splits<Small>(problem).time <
           100 * choose_splits<Dense>(problem).time;
  }

 private:
  // Whether the varlen kernel takes the call, if it has no modifiers.
  static bool takes_varlen_kernel(const BwdProblem& problem) {
    return problem.is_varlen() || problem.seqused_k != nullptr ||
           (Dense::kGradQ && has_short_windows(problem)) ||
           choose_splits<Dense>(problem).counts.queries > 1;
  }

  static bool has_bias(const BwdProblem& problem) { return problem.modifiers.bias.data != nullptr; }

  // Of kDense: those of kVarlen, which has the same tiles, and also divides query blocks.
  template <class C>
  static KeyTileChoice choose_splits(const BwdProblem& problem) {
    return KeyTileChoice::make(problem, C::kBlockQ, C::kBlockKV, C::kBlocksPerSM, true);
  }

  // Queries times keys of the tiles of a sequence that has the mean lengths. On average half of the
  // last tile lies beyond the end.
  template <class C>
  static int64_t mean_area(const BwdProblem& problem) {
    auto const mean = [&](const Sequences& sequences) {
      return sequences.offsets == nullptr ? sequences.seqlen
                                          : sequences.total / std::max<int64_t>(problem.batch, 1);
    };
    return (mean(problem.queries) + C::kBlockQ / 2) * (mean(problem.keys) + C::kBlockKV / 2);
  }

  // Calls `use` with the configuration of these bits and those of the call's score modifiers; of
  // calls without any, with `kPlain` too.
  template <unsigned kBits, unsigned kPlain = BwdVariant::kDense, class Use>
  static auto choose(const BwdProblem& problem, Use&& use) {
    return has_bias(problem)         ? use(Config<kBits | BwdVariant::kBias>{})
           : problem.has_modifiers() ? use(Config<kBits | BwdVariant::kModifiers>{})
                                     : use(Config<kBits | kPlain>{});
  }
};

}  // namespace flashvar::sm90::attention
