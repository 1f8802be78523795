// Segments of the backward's chains (segments.h), in the same three passes. The gradient dS of the
// state at a segment's start is a linear function of that at its end: M^T dS + Z', with the M of
// S' = M S + Z. So both chains share the transitions, and neither waits for the other:
//   1. the chains whose start is known, with their results: that of the states through a sequence's
//      first segment, the reverse one through its last. For inner segments: Z, from a state of
//      zeros; Z', from a gradient of zeros; and M
//   2. the states at the boundaries, S' = M S + Z, and their gradients, dS' = M^T dS + Z'
//   3. the other chains: of the states through all segments but the first, the reverse ones through
//      all but the last
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "gated_delta_rule/segments.h"

namespace flashvar::gated_delta_rule {

// Nanoseconds that a chunk of 64 columns takes: in a block that has a multiprocessor to itself, and
// in two blocks that share one.
struct GradChainTime {
  int64_t alone, pair;
};
// Measured or estimated times, in nanoseconds. Blocks of segments have a multiprocessor to
// themselves.
struct GradChainCosts {
  int64_t multiprocessors;
  GradChainTime chunk;  // a chunk of a sequence that is not divided
  int64_t output;       // with results: a chunk of 64 columns of a reverse chain; also an upper
                        // bound for one of 128 columns of a chain of states
  int64_t inner;        // without results: a chunk of 128 columns of either chain
  int64_t scan;         // a boundary of 8 columns of V, in two blocks that share a multiprocessor
  int64_t start;        // per block: launch, first loads, loads and stores of states
};

// As the chain_cost() of the forward. With n segments of c chunks, and one tile of columns of each
// size, pass 3 is 2 (n - 1) blocks of c chunks; pass 1 is two such blocks, and three for each of
// the n - 2 inner segments; pass 2 is n - 2 boundaries of each chain.
inline int64_t chain_cost(const Problem& problem, const GradChainCosts& costs, int64_t sequences,
                          int64_t chunks, int64_t count) {
  int64_t const chains = sequences * problem.heads, v = problem.head_dim_v;
  int64_t const tiles_64 = ceil_div(v, 64), tiles_128 = ceil_div(v, 128);
  if (count == 1) {
    int64_t const deepest = ceil_div(2 * chains * tiles_64, costs.multiprocessors);
    return costs.start +
           chunks * (deepest / 2 * costs.chunk.pair + deepest % 2 * costs.chunk.alone);
  }
  auto const time = [&](int64_t blocks, int64_t block_time) {
    return ceil_div(blocks, costs.multiprocessors) * (costs.start + block_time);
  };
  int64_t const length = ceil_div(chunks, count), inner = count - 2;
  int64_t const blocks =
      tiles_64 + tiles_128 + inner * (2 * tiles_128 + ceil_div(problem.head_dim, 128));
  int64_t const chunk_time = inner > 0 ? std::max(costs.output, costs.inner) : costs.output;
  return time(chains * blocks, length * chunk_time) +
         time(chains * ceil_div(v, 8), inner * costs.scan) +
         time(chains * (count - 1) * (tiles_64 + tiles_128), length * costs.output);
}

// The data that the passes over segments leave in the workspace for the next pass.
struct GradSegments {
  Segments segments;
  uint32_t boundaries;
  SegmentStates between;  // Z after pass 1, then states; transitions M
  SegmentStates grads;    // Z' after pass 1, then gradients of the states; transposed transitions
  uint64_t bytes;

  GradSegments() = default;
  GradSegments(const Problem& problem, const Segments& segments, int64_t dim, void* memory)
      : segments(segments),
        boundaries(static_cast<uint32_t>(segments.boundaries(problem))),
        between(problem, segments, dim, memory),
        grads(problem, segments, dim, static_cast<char*>(memory) + between.bytes),
        bytes(between.bytes + grads.bytes) {}
};

}  // namespace flashvar::gated_delta_rule
