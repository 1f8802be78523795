// Where key tiles are few, several blocks share one. Each has a part of its query heads or query
// blocks, and adds its dK and dV to sums in the workspace. Host only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/key_splits.h"
#include "core/ceil_div.h"

namespace flashvar::sm80::attention {

using namespace flashvar::attention;  // what all architectures share

// Blocks that suffice: eight per SM, because blocks differ in work under a mask.
inline constexpr int64_t kEnoughBlocks = 8 * kMultiprocessors;

// Into how many parts the `group` query heads of a key tile are divided, each for a block of its
// own: a divisor of `group`. `blocks`: key tiles.
inline int32_t count_head_parts(int64_t blocks, int32_t group) {
  int32_t parts = static_cast<int32_t>(std::min<int64_t>(group, ceil_div(kEnoughBlocks, blocks)));
  while (group % parts != 0) ++parts;
  return parts;
}

// Into how many parts the query blocks of a head are divided. `blocks`: key tiles, each with the
// same heads; `steps`: query blocks that a tile sees at most. Fitted to calls measured on 9.0
// (docs/hopper-ledger.md): adding the parts, and two more kernels, take as long as a few steps.
//
// Under a causal mask tiles differ in work, and all start at once: more and smaller blocks fill
// the time at the end. Otherwise only where the parts, too, run at the same time.
inline int32_t count_query_parts(int64_t blocks, int64_t steps, bool causal, int blocks_per_sm) {
  constexpr int64_t kFewestSaved = 4, kFewestSteps = 2;
  constexpr int64_t kBalancing = 4, kCausalBlocks = 3 * kMultiprocessors;
  int64_t parts = 1;
  if (causal) {
    int64_t const most = std::min(kEnoughBlocks / blocks, steps / kFewestSteps);
    parts = std::min(std::max(kBalancing, kCausalBlocks / blocks), most);
  } else if (2 * blocks <= kMultiprocessors) {
    int64_t const filling = blocks_per_sm * kMultiprocessors / blocks;
    int64_t const of_part = ceil_div(steps, filling);
    if (steps - of_part >= kFewestSaved) parts = ceil_div(steps, of_part);
  }
  return static_cast<int32_t>(std::max(parts, int64_t{1}));
}

}  // namespace flashvar::sm80::attention
