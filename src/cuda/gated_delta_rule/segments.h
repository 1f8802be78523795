// Segments: sequences are divided into parts that run in parallel, where chains over whole
// sequences would leave most of the device idle.
//
// A segment maps the state S at its start to M S + Z at its end. An inner segment is one that is
// neither the first nor the last of its sequence. Three passes, without approximation:
//   1. for inner segments: Z, computed from a state of zeros, and the transition M, computed from
//      the identity with V = 0. For first segments, whose initial state is known: the state after
//      them
//   2. the states at the boundaries between segments, in order: S' = M S + Z
//   3. the forward, with each segment as a chain of its own that starts from its state
// On 9.0 pass 1 computes the output of first segments as well, in blocks of a second kind, and pass
// 3 has the other segments only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/problem.h"

namespace flashvar::gated_delta_rule {

struct Segments {
  int32_t rows;  // per segment, a multiple of the chunk; 0: sequences are not divided

  // Number of boundaries between segments. For varlen sequences, whose lengths only the device
  // knows, the most that there may be: each has a row after it.
  int64_t boundaries(const Problem& problem) const {
    if (rows == 0) return 0;
    if (problem.rows.offsets != nullptr) return (problem.rows.total - 1) / rows;
    return problem.sequences * ((problem.rows.seqlen - 1) / rows);
  }

#ifdef __CUDACC__
  // Index of a sequence's first boundary. For varlen sequences it is derived from the offset:
  // boundaries are at least `rows` rows apart, so that no two get the same index.
  __device__ __forceinline__ int32_t first_boundary(const Sequences& sequences,
                                                    uint32_t sequence) const {
    if (sequences.offsets == nullptr) {
      return static_cast<int32_t>(sequence) * ((sequences.seqlen - 1) / rows);
    }
    return min(max(sequences.offsets[sequence], 0), sequences.total) / rows;
  }
#endif
};

// Measured times of the parts of a chain, in nanoseconds, of a block alone on a multiprocessor.
struct ChainCosts {
  int64_t multiprocessors;
  int64_t columns_64, columns_128;  // a chunk of so many columns of V
  int64_t state;    // a chunk of 128 columns of V or of a transition, without the output
  int64_t scan;     // a boundary of 8 columns of V
  int64_t start;    // per block: launch, first loads, loads and stores of states
  bool first_once;  // pass 1 computes the output of first segments, and pass 3 omits them
};

// Estimated time of the chains of `sequences` sequences of `chunks` chunks, in `count` segments
// each: the sum over the waves of blocks. With n segments of c chunks and one tile of columns, pass
// 3 is n blocks of c chunks; pass 1 is 2 n - 3 blocks of c chunks, as the first segment has no
// transition and the last one takes no part; pass 2 is n - 2 boundaries. With first_once, pass 3
// has one block less, and the first segment's block of pass 1 takes as long as one of pass 3.
inline int64_t chain_cost(const Problem& problem, const ChainCosts& costs, int64_t sequences,
                          int64_t chunks, int64_t count) {
  int64_t const chains = sequences * problem.heads, v = problem.head_dim_v;
  int64_t const length = ceil_div(chunks, count);
  auto const time = [&](int64_t blocks, int64_t block_time) {
    return ceil_div(blocks, costs.multiprocessors) * (costs.start + block_time);
  };
  bool const first_once = costs.first_once && count > 1;
  int64_t const last_pass = chains * (first_once ? count - 1 : count);
  int64_t const blocks_64 = last_pass * ceil_div(v, 64), blocks_128 = last_pass * ceil_div(v, 128);
  int64_t const cost = blocks_64 <= costs.multiprocessors
                           ? time(blocks_64, length * costs.columns_64)
                           : time(blocks_128, length * costs.columns_128);
  if (count == 1) return cost;
  int64_t const first = ceil_div(v, first_once ? 64 : 128);
  int64_t const inner = (count - 2) * (ceil_div(problem.head_dim, 128) + ceil_div(v, 128));
  int64_t const chunk_time = first_once ? std::max(costs.columns_64, costs.state) : costs.state;
  return cost + time(chains * (first + inner), length * chunk_time) +
         time(chains * ceil_div(v, 8), (count - 2) * costs.scan);
}

// The division with the least estimated time, chain_cost() of `costs`. It depends on the call's
// sizes alone, so that equal calls have equal results. Varlen sequences are estimated as one
// sequence of all rows: where they are in fact shorter than a segment, the passes have less work or
// none. Nothing is divided where sequences times heads are at least kEnoughChains per
// multiprocessor: they fill the device, unless one of so many sequences has most of the rows, which
// is rare. A segment has at least kMinChunks chunks.
template <class Costs>
Segments choose_segments(const Problem& problem, const Costs& costs) {
  constexpr int64_t kMinChunks = 8, kMaxSegments = 64, kEnoughChains = 8;
  if (problem.sequences * problem.heads >= kEnoughChains * costs.multiprocessors) return {0};
  bool const varlen = problem.rows.offsets != nullptr;
  int64_t const sequences = varlen ? 1 : problem.sequences;
  int64_t const chunks =
      ceil_div(int64_t{varlen ? problem.rows.total : problem.rows.seqlen}, kChunk);
  int64_t best = 1, least = 0;
  for (int64_t count = 1; count <= std::min(kMaxSegments, chunks / kMinChunks); ++count) {
    int64_t const cost = chain_cost(problem, costs, sequences, chunks, count);
    // Segments cost memory: they must save at least a twentieth of the time.
    if (count == 1 || 20 * cost < (best == 1 ? 19 : 20) * least) best = count, least = cost;
  }
  if (best == 1) return {0};
  return {static_cast<int32_t>(ceil_div(chunks, best) * kChunk)};
}

// States and transitions at the boundaries between segments, in the workspace, fp32
// [boundary][head][column of V][dim].
struct SegmentStates {
  // Z after pass 1, the state at the boundary after pass 2. At a sequence's first boundary pass 1
  // writes the state itself.
  State states;
  State transitions;  // M after pass 1; its columns are stored like columns of V
  uint64_t bytes;

  SegmentStates() = default;
  SegmentStates(const Problem& problem, const Segments& segments, int64_t dim, void* memory)
      : states(view(problem.heads, problem.head_dim_v, dim, memory)) {
    int64_t const boundaries = segments.boundaries(problem);
    int64_t const elements = boundaries * states.sequence_stride;
    transitions = view(problem.heads, problem.head_dim, dim, states.data + elements);
    bytes = sizeof(float) * (elements + boundaries * transitions.sequence_stride);
  }

 private:
  static State view(int64_t heads, int64_t columns, int64_t dim, void* memory) {
    return {static_cast<float*>(memory), heads * columns * dim, columns * dim, 1, dim};
  }
};

}  // namespace flashvar::gated_delta_rule
