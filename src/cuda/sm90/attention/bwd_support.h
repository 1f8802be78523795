// Which calls the wgmma backward supports. Host only.
#pragma once
#include <cstdint>

#include "attention/key_splits.h"
#include "attention/problem.h"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

inline constexpr int64_t kMinMeanQueries = 32;  // half of the smallest query tile
inline constexpr int32_t kSmallBlockKV = 64;
static_assert(kMinMeanQueries == 32 && kSmallBlockKV == 64, "a text below says so");

// Whether sequences have fewer queries than this on average: most of the workspace's tiles would
// then be padding.
inline bool are_short(const Sequences& sequences, int64_t batch) {
  return sequences.offsets != nullptr && sequences.total < kMinMeanQueries * batch;
}

// Whether key tiles store dQ, because every sequence has one.
template <class Config>
bool stores_grad_q(const BwdProblem& problem) {
  return Config::kStoresGradQ && problem.has_one_key_tile(Config::kBlockKV);
}

// Why the mma.sync kernels compute a problem, whatever its addresses; null: they need not.
// `up_to_128`: whether the kernels' head dims are at most 128. Those have small tiles, which need
// no sums for sequences of one key tile, and compute the gradient of a bias.
inline const char* bwd_unsupported(const BwdProblem& problem, bool up_to_128) {
  bool const has_sums = !up_to_128 || !problem.has_one_key_tile(kSmallBlockKV);
  if (has_sums && are_short(problem.queries, problem.batch)) {
    return up_to_128 ? "the wgmma backward does not support packed sequences of fewer than 32 "
                       "queries on average, if they may have more than 64 keys"
                     : "the wgmma backward does not support packed sequences of fewer than 32 "
                       "queries on average above head dim 128";
  }
  if (problem.grad_bias.data != nullptr && !up_to_128) {
    return "the wgmma backward does not support the gradient of a bias above head dim 128";
  }
  auto const is_empty = [](const Sequences& sequences) {
    return sequences.seqlen == 0 || (sequences.offsets != nullptr && sequences.total == 0);
  };
  if (is_empty(problem.queries) || is_empty(problem.keys)) return "there are no scores";
  return nullptr;
}

// Whether the windows are at most half as long as the sequences. Key tiles then have equal work, so
// that pairs of them are not needed. Tiles that run together see different queries: the varlen
// kernel takes one head of a group after the other, so that the data in use at a time fit L2. The
// dense kernel has no registers for this order.
inline bool has_short_windows(const BwdProblem& problem) {
  return problem.window_left != kUnbounded && problem.window_right != kUnbounded &&
         2 * (int64_t{problem.window_left} + problem.window_right) <= problem.keys.seqlen;
}

// Whether tensor maps can be clipped (clipped_map.h): they begin in front of the tensors.
inline bool maps_can_be_clipped(const BwdProblem& problem) {
  auto const rows = [](const Sequences& sequences) -> int64_t {
    return sequences.offsets == nullptr ? sequences.seqlen : sequences.total;
  };
  return has_room_in_front(problem.q, rows(problem.queries)) &&
         has_room_in_front(problem.grad_out, rows(problem.queries)) &&
         has_room_in_front(problem.k, rows(problem.keys)) &&
         has_room_in_front(problem.v, rows(problem.keys));
}

}  // namespace flashvar::sm90::attention
