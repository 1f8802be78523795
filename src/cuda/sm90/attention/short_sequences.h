// Short sequences, whose backward the mma.sync kernels compute faster: a tile of the wgmma backward
// has 64 rows or more, a CTA works on one tile at a time, and few steps do not fill its pipeline.
// Host only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/problem.h"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// The most queries and keys of short sequences; `_modifiers`: in calls with score modifiers.
struct ShortSequences {
  int max_head_dim;  // of the kernel
  int bwd, bwd_modifiers;
};

// Measured on an H200 (docs/hopper-ledger.md).
inline constexpr ShortSequences kShortSequences[] = {{32, 56, 32}, {64, 80, 48}, {256, 0, 0}};

inline constexpr const char* kWhyShort =
    "sequences are so short that these kernels are faster than those with wgmma";

constexpr ShortSequences short_sequences(int head_dim) {
  for (const ShortSequences& row : kShortSequences) {
    if (head_dim <= row.max_head_dim) return row;
  }
  return {};
}

inline bool have_at_most(const Problem& problem, int length) {
  return !problem.is_varlen() && std::max(problem.queries.seqlen, problem.keys.seqlen) <= length;
}

}  // namespace flashvar::sm90::attention
