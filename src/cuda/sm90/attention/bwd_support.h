// Which calls the wgmma backward supports. Host only.
#pragma once
#include <cstdint>

#include "attention/problem.h"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

inline constexpr int64_t kMinMeanQueries = 32;  // half of the smallest query tile
static_assert(kMinMeanQueries == 32, "the texts below say 32");

// Whether sequences have fewer queries than this on average: most of the workspace's tiles would
// then be padding.
inline bool are_short(const Sequences& sequences, int64_t batch) {
  return sequences.offsets != nullptr && sequences.total < kMinMeanQueries * batch;
}

// Why a problem goes to the mma.sync kernels whatever its addresses; null: it does not.
// `supports_grad_bias`: whether the wgmma kernels for its head dims compute the gradient of a bias.
inline const char* bwd_unsupported(const BwdProblem& problem, bool supports_grad_bias) {
  if (are_short(problem.queries, problem.batch)) {
    return "the wgmma backward does not support packed sequences of fewer than 32 queries on "
           "average";
  }
  if (problem.grad_bias.data != nullptr && !supports_grad_bias) {
    return "the wgmma backward does not support the gradient of a bias above head dim 128";
  }
  if (problem.queries.seqlen == 0 || problem.keys.seqlen == 0) return "there are no scores";
  return nullptr;
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
