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
    int32_t const keys = problem.keys.seqlen;
    // Where sequences have one small key tile, so that it stores dQ, small tiles are best.
    if (stores_grad_q<Small>(problem)) return true;
    if (problem.has_one_key_tile(Dense::kBlockKV) || keys > kMostKeys || problem.deterministic)
      return false;
    // Larger tiles take less time for the same area, most of all at large head dims.
    return Dense::kLargest <= 96 && 8 * tile_area<Dense>(problem) >= 9 * tile_area<Small>(problem);
  }

 private:
  // Whether the varlen kernel takes the call, if it has no modifiers.
  static bool takes_varlen_kernel(const BwdProblem& problem) {
    return problem.is_varlen() || problem.seqused_k != nullptr ||
           (Dense::kGradQ && has_short_windows(problem)) ||
           count_key_tile_splits(problem, Dense::kBlockQ, Dense::kBlockKV, 1, true).queries > 1;
  }

  static bool has_bias(const BwdProblem& problem) { return problem.modifiers.bias.data != nullptr; }

  // The queries times the keys of the tiles that a sequence's key tiles visit. Of packed sequences
  // whose lengths differ, estimated from the mean lengths.
  template <class C>
  static int64_t tile_area(const BwdProblem& problem) {
    auto const mean = [&](const Sequences& sequences) {
      return sequences.offsets == nullptr ? sequences.seqlen
                                          : sequences.total / std::max<int64_t>(problem.batch, 1);
    };
    int64_t const mean_q = mean(problem.queries), mean_k = mean(problem.keys);
    int64_t const queries = problem.queries.seqlen, keys = problem.keys.seqlen;
    if (mean_q != queries || mean_k != keys) {
      return (mean_q + C::kBlockQ / 2) * (mean_k + C::kBlockKV / 2);
    }
    int64_t blocks = 0;
    for (int64_t first = 0; first < keys; first += C::kBlockKV) {
      int64_t const last = std::min(first + C::kBlockKV, keys) - 1, shift = queries - keys;
      bool const causal = problem.window_right != kUnbounded;
      bool const bounded = problem.window_left != kUnbounded;
      int64_t const begin = causal ? std::max(first - problem.window_right + shift, int64_t{0}) : 0;
      int64_t const end =
          bounded ? std::min(last + problem.window_left + shift + 1, queries) : queries;
      if (begin < end) blocks += (end - 1) / C::kBlockQ - begin / C::kBlockQ + 1;
    }
    return blocks * C::kBlockQ * C::kBlockKV;
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
