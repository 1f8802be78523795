// Parts of the passes over segments (segments.h) for both families: the work of a block, and loads
// and stores of the states that one pass leaves to the next.
#pragma once
#include <cstdint>

#include "core/ceil_div.h"
#include "gated_delta_rule/chain_parts.cuh"
#include "gated_delta_rule/segments.h"
#include "ptx/grid_dependency.cuh"
#include "ptx/warp_uniform.cuh"

namespace flashvar::gated_delta_rule {

// The work of a block: columns of V of one head of one segment.
struct SegmentWork : Work {
  bool exists;            // false: a surplus block, which exits
  int32_t before, after;  // boundaries at the segment's ends; -1: an end of the sequence

  // Pass 3 of all segments: the grid's rows are the segments that end at a boundary, then the last
  // segment of each sequence. `block`: index among the blocks of a pass.
  static __device__ __forceinline__ SegmentWork any_segment(const FwdProblem& problem,
                                                            const Segments& segments,
                                                            uint32_t boundaries, uint32_t tiles,
                                                            int columns,
                                                            uint32_t block = blockIdx.x) {
    BlockCoordinate const coordinate(problem, tiles, block);
    if (coordinate.row < boundaries)
      return ending_at_boundary(problem, segments, tiles, columns, block);
    return at_end_of_sequence(problem, segments, coordinate, coordinate.row - boundaries, columns);
  }

  // The grid's rows are sequences: the first segment of each, or all of one that is not divided.
  static __device__ __forceinline__ SegmentWork first_segment(const FwdProblem& problem,
                                                              const Segments& segments,
                                                              uint32_t tiles, int columns,
                                                              uint32_t block = blockIdx.x) {
    BlockCoordinate const coordinate(problem, tiles, block);
    return {problem, segments, coordinate, {coordinate.row, 0}, columns};
  }

  // As first_segment(): the last segment of each sequence.
  static __device__ __forceinline__ SegmentWork last_segment(const FwdProblem& problem,
                                                             const Segments& segments,
                                                             uint32_t tiles, int columns,
                                                             uint32_t block = blockIdx.x) {
    BlockCoordinate const coordinate(problem, tiles, block);
    return at_end_of_sequence(problem, segments, coordinate, coordinate.row, columns);
  }

  // Pass 1: the grid's rows are the segments that end at a boundary.
  static __device__ __forceinline__ SegmentWork ending_at_boundary(const FwdProblem& problem,
                                                                   const Segments& segments,
                                                                   uint32_t tiles, int columns,
                                                                   uint32_t block = blockIdx.x) {
    SegmentWork work =
        at_boundary(problem, segments, BlockCoordinate(problem, tiles, block), columns, 0);
    work.exists = work.after >= 0;  // grids are sized for the most boundaries there may be
    return work;
  }

  // Pass 3 without first segments: the grid's rows are the segments that start at a boundary.
  static __device__ __forceinline__ SegmentWork starting_at_boundary(const FwdProblem& problem,
                                                                     const Segments& segments,
                                                                     uint32_t tiles, int columns,
                                                                     uint32_t block = blockIdx.x) {
    SegmentWork work =
        at_boundary(problem, segments, BlockCoordinate(problem, tiles, block), columns, 1);
    // Grids are sized for the most boundaries there may be, also before the first sequence.
    work.exists = work.before >= 0 && work.span.count > 0;
    return work;
  }

 protected:
  static __device__ __forceinline__ SegmentWork
  at_end_of_sequence(const FwdProblem& problem, const Segments& segments,
                     const BlockCoordinate& coordinate, uint32_t sequence, int columns) {
    int32_t const last = max(problem.rows.span(sequence).count - 1, 0);
    int32_t const row = segments.rows == 0 ? 0 : last / segments.rows * segments.rows;
    return {problem, segments, coordinate, {sequence, row}, columns};
  }

  // The segment that ends at the boundary of the grid's row, or, with `next` 1, the one that starts
  // there. It is empty if it would start beyond the end of the sequence.
  static __device__ __forceinline__ SegmentWork at_boundary(const FwdProblem& problem,
                                                            const Segments& segments,
                                                            const BlockCoordinate& coordinate,
                                                            int columns, int next) {
    auto const first = [&](uint32_t sequence) {
      return static_cast<uint32_t>(segments.first_boundary(problem.rows, sequence));
    };
    uint32_t const sequence =
        Sequences::last_at_most(coordinate.row, static_cast<uint32_t>(problem.sequences), first);
    int64_t const row = (int64_t{coordinate.row} - first(sequence) + next) * segments.rows;
    int64_t const end = problem.rows.span(sequence).count;
    TileCoordinate const at{ptx::warp_uniform(sequence),
                            ptx::warp_uniform(static_cast<int32_t>(row < end ? row : end))};
    return {problem, segments, coordinate, at, columns};
  }

  __device__ __forceinline__ SegmentWork(const FwdProblem& problem, const Segments& segments,
                                         const BlockCoordinate& coordinate,
                                         const TileCoordinate& at, int columns)
      : Work(problem, coordinate, at.batch, columns), exists(true), before(-1), after(-1) {
    if (segments.rows == 0) return;
    int32_t const boundary =
        segments.first_boundary(problem.rows, sequence) + at.first / segments.rows;
    if (at.first > 0) before = boundary - 1;
    if (at.first >= 0 && span.count - at.first > segments.rows) after = boundary;
    first_chunk += at.first / kChunk;
    span.first += at.first;
    span.count = min(span.count - at.first, segments.rows);
  }
};

// The work of a block of pass 1. The column tiles are those of V, followed by those of the
// transition.
struct Pass1Work : SegmentWork {
  bool is_transition;  // columns are those of K

  // `includes_first`: whether the states after first segments are among the work.
  __device__ __forceinline__ Pass1Work(const FwdProblem& problem, const Segments& segments,
                                       uint32_t tiles, int columns, bool includes_first,
                                       uint32_t block = blockIdx.x)
      : SegmentWork(ending_at_boundary(problem, segments, tiles, columns, block)) {
    int32_t const value_columns = ceil_div(problem.head_dim_v, columns) * columns;
    is_transition = column >= value_columns;
    if (is_transition) column -= value_columns;
    // The first segment, whose state is known, needs no transition.
    exists = exists && (before >= 0 || (includes_first && !is_transition));
  }

  // Columns of V to load: none for a transition, which takes V = 0.
  __device__ __forceinline__ int32_t values(const FwdProblem& problem) const {
    return is_transition ? 0 : problem.head_dim_v - column;
  }
};

// Calls f(i, address) for each pair (i, i + 1) of the thread's accumulator elements that lies
// within a state between segments, or a transition.
template <int kDim, class F>
__device__ __forceinline__ void for_each_pair(const State& state, int32_t boundary, uint32_t head,
                                              int32_t column, int32_t columns, F f) {
  Lane const lane;
  StateCoordinate const first(lane, column, 0);
  float* const data = state.data + boundary * state.sequence_stride + head * state.head_stride +
                      int64_t{first.v} * kDim + first.k;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (first.v + 8 * half >= columns) continue;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      f(4 * n + 2 * half, reinterpret_cast<float2*>(data + 8 * half * kDim + 8 * n));
    }
  }
}

// Loads the initial state of a sequence, from column `column` of V on; zeros if there is none.
template <int kDim>
__device__ __forceinline__ void load_initial_state(const FwdProblem& problem, const Work& work,
                                                   int32_t column, float (&state)[kDim / 2]) {
#pragma unroll
  for (float& value : state) value = 0.f;
  load_state<kDim>(problem, problem.initial_state, work, column, state);
}

// Pass 3: loads the state at a segment's start.
template <int kDim>
__device__ __forceinline__ void load_first_state(const FwdProblem& problem,
                                                 const SegmentStates& between,
                                                 const SegmentWork& work, int32_t column,
                                                 float (&state)[kDim / 2]) {
  if (work.before < 0) return load_initial_state<kDim>(problem, work, column, state);
#pragma unroll
  for (float& value : state) value = 0.f;
  ptx::griddepcontrol_wait();  // pass 2 has written the states
  for_each_pair<kDim>(between.states, work.before, work.head, column, problem.head_dim_v,
                      [&](int i, const float2* from) {
                        state[i] = from->x;
                        state[i + 1] = from->y;
                      });
}

// Pass 3: stores a sequence's final state, if the caller wants it.
template <int kDim>
__device__ __forceinline__ void store_final_state(const FwdProblem& problem,
                                                  const SegmentWork& work, int32_t column,
                                                  const float (&state)[kDim / 2]) {
  if (work.after >= 0 || problem.final_state.data == nullptr) return;
  for_each_state_element<kDim>(problem, problem.final_state, work, column,
                               [&](int i, float* to) { *to = state[i]; });
}

// Stores the state after a first segment, if another segment follows.
template <int kDim>
__device__ __forceinline__ void store_state_after(const FwdProblem& problem,
                                                  const SegmentStates& between,
                                                  const SegmentWork& work, int32_t column,
                                                  const float (&state)[kDim / 2]) {
  if (work.after < 0) return;
  for_each_pair<kDim>(between.states, work.after, work.head, column, problem.head_dim_v,
                      [&](int i, float2* to) { *to = {state[i], state[i + 1]}; });
}

// Pass 1: initializes a segment's state, or its transition (the identity).
template <int kDim>
__device__ __forceinline__ void load_first_state(const FwdProblem& problem, const Pass1Work& work,
                                                 int32_t column, float (&state)[kDim / 2]) {
  if (work.before < 0) return load_initial_state<kDim>(problem, work, column, state);
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) {
    StateCoordinate const at(Lane(), column, i);
    state[i] = work.is_transition && at.v == at.k ? 1.f : 0.f;
  }
}

// Pass 1: stores the result.
template <int kDim>
__device__ __forceinline__ void store_last_state(const FwdProblem& problem,
                                                 const SegmentStates& between,
                                                 const Pass1Work& work, int32_t column,
                                                 const float (&state)[kDim / 2]) {
  for_each_pair<kDim>(work.is_transition ? between.transitions : between.states, work.after,
                      work.head, column, work.is_transition ? problem.head_dim : problem.head_dim_v,
                      [&](int i, float2* to) { *to = {state[i], state[i + 1]}; });
}

// Pass 1: stores columns of a transition as rows, for the scan of gradients. There is memory for K
// of them, not for kDim.
template <int kDim>
__device__ __forceinline__ void store_transposed(const FwdProblem& problem,
                                                 const SegmentStates& grads, const Pass1Work& work,
                                                 int32_t column, const float (&state)[kDim / 2]) {
  const State& to = grads.transitions;
  float* const data = to.data + work.after * to.sequence_stride + work.head * to.head_stride;
  Lane const lane;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) {
    StateCoordinate const at(lane, column, i);
    if (at.v < problem.head_dim && at.k < problem.head_dim) data[at.k * kDim + at.v] = state[i];
  }
}

}  // namespace flashvar::gated_delta_rule
