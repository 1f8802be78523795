// Segments of the backward's chains (segments.h), in the same three passes. The gradient dS of the
// state at a segment's start is a linear function of that at its end: M^T dS + b', with the M of
// S' = M S + b. So both chains share the transitions, and neither waits for the other:
//   1. of each segment but a sequence's last: b, or the state after the first segment; of each one
//      but the first: b', computed from a gradient of zeros, or the gradient before the last
//      segment; of those that are neither: M
//   2. the states at the boundaries, S' = M S + b, and their gradients, dS' = M^T dS + b'
//   3. both chains of all segments
#pragma once
#include <cstdint>

#include "gated_delta_rule/segments.h"

namespace flashvar::gated_delta_rule {

// Times of the parts of a chain of 64 columns, in nanoseconds: of a block that has a multiprocessor
// to itself, and of two that share one.
struct GradChainTime {
  int64_t alone, pair;
};
struct GradChainCosts {
  int64_t multiprocessors;
  GradChainTime chunk;  // of pass 3
  GradChainTime inner;  // a chunk of pass 1, which writes no results of the chunk
  int64_t scan;         // a boundary of 8 columns of V
  int64_t start;        // per block: launch, first loads, loads and stores of states
};

// As the chain_cost() of the forward. With n segments of c chunks and one tile of columns, pass 3
// is 2 n blocks of c chunks; pass 1 is n - 1 blocks for each chain, and n - 2 for the transitions;
// pass 2 is n - 2 boundaries of each chain.
inline int64_t chain_cost(const Problem& problem, const GradChainCosts& costs, int64_t sequences,
                          int64_t chunks, int64_t count) {
  auto const tiles = [](int64_t columns, int64_t size) { return (columns + size - 1) / size; };
  int64_t const chains = sequences * problem.heads, v = problem.head_dim_v;
  int64_t const length = tiles(chunks, count);
  auto const time = [&](int64_t blocks, const GradChainTime& of_chunk) {
    int64_t const deepest = tiles(blocks, costs.multiprocessors);  // blocks of one multiprocessor
    return costs.start + length * (deepest / 2 * of_chunk.pair + deepest % 2 * of_chunk.alone);
  };
  int64_t const cost = time(2 * chains * count * tiles(v, 64), costs.chunk);
  if (count == 1) return cost;
  int64_t const ends = 2 * (count - 1) * tiles(v, 64);
  int64_t const transitions = (count - 2) * tiles(problem.head_dim, 64);
  return cost + time(chains * (ends + transitions), costs.inner) +
         tiles(2 * chains * tiles(v, 8), costs.multiprocessors) *
             (costs.start + (count - 2) * costs.scan);
}

// What the passes over segments hand to one another.
struct GradSegments {
  Segments segments;
  uint32_t boundaries;
  SegmentStates between;  // states and transitions
  SegmentStates grads;    // b' after pass 1, then gradients of the states; the same transitions
  uint64_t bytes;

  GradSegments() = default;
  GradSegments(const Problem& problem, const Segments& segments, int64_t dim, void* memory)
      : segments(segments),
        boundaries(static_cast<uint32_t>(segments.boundaries(problem))),
        between(problem, segments, dim, memory),
        grads(between),
        bytes(between.bytes + sizeof(float) * boundaries * between.states.sequence_stride) {
    grads.states.data =
        between.transitions.data + int64_t{boundaries} * between.transitions.sequence_stride;
  }
};

}  // namespace flashvar::gated_delta_rule
