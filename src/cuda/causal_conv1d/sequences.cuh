// Locates sequences and the tokens before them. Whatever cu_seqlens holds, no row outside of the
// tensors is accessed.
#pragma once
#include <cstdint>

#include "causal_conv1d/problem.h"
#include "causal_conv1d/tensors.cuh"
#include "core/ceil_div.h"

namespace flashvar::causal_conv1d {

// A sequence: rows [begin, end) of a batch entry.
struct Sequence {
  int64_t index;  // of the sequence
  int64_t batch;
  int64_t begin, end;
};

__device__ __forceinline__ bool is_varlen(const Problem& problem) {
  return problem.cu_seqlens.data != nullptr;
}

// The rows of sequence `index`.
__device__ __forceinline__ Sequence sequence_at(const Problem& problem, int64_t index) {
  if (!is_varlen(problem)) return {index, index, 0, problem.seqlen};
  int64_t const begin = min(max(load(problem.cu_seqlens, index), int64_t{0}), problem.seqlen);
  int64_t const end = min(max(load(problem.cu_seqlens, index + 1), begin), problem.seqlen);
  return {index, 0, begin, end};
}

// The last varlen sequence that begins at or before `row`. All lanes of the warp call it, with the
// same row; a 32-ary search, as Sequences::last_at_most (core/sequences.cuh).
__device__ __forceinline__ int64_t find_by_warp(const Problem& problem, int64_t row) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int64_t found = 0;
  for (int64_t candidates = problem.sequences; candidates > 1;) {
    int64_t const step = ceil_div(candidates, 32);
    bool const fits = lane == 0 || (lane * step < candidates &&
                                    load(problem.cu_seqlens, found + lane * step) <= row);
    int const last = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, fits)));
    found += last * step;
    candidates = min(step, candidates - last * step);
  }
  return found;
}

// The varlen sequence of a row, searched from sequence `from` on, by one thread. Rows after a
// sequence's end count as that sequence's, rows before the first as the first's.
__device__ __forceinline__ Sequence find(const Problem& problem, int64_t row, int64_t from) {
  int64_t low = from, step = 1;
  while (low + step < problem.sequences && load(problem.cu_seqlens, low + step) <= row) {
    low += step;
    step *= 2;
  }
  int64_t high = min(low + step, problem.sequences);
  while (high - low > 1) {
    int64_t const middle = low + (high - low) / 2;
    bool const fits = load(problem.cu_seqlens, middle) <= row;
    low = fits ? middle : low;
    high = fits ? high : middle;
  }
  int64_t begin = 0, end = problem.seqlen;
  if (low > 0) begin = min(max(load(problem.cu_seqlens, low), int64_t{0}), row);
  if (low + 1 < problem.sequences) {
    end = min(max(load(problem.cu_seqlens, low + 1), row + 1), problem.seqlen);
  }
  return {low, 0, begin, end};
}

// The token `back` tokens before the sequence, from its state; 0 if there is none.
__device__ __forceinline__ float state_token(const Problem& problem, const Sequence& sequence,
                                             int64_t channel, int64_t back) {
  if (problem.state.data == nullptr || back > problem.columns) return 0.f;
  return load(problem.state,
              offset(problem.state, sequence.index, channel, problem.columns - back));
}

// Token `at` of a sequence; negative: of its state.
__device__ __forceinline__ float token(const Problem& problem, const Sequence& sequence,
                                       int64_t channel, int64_t at) {
  if (at < 0) return state_token(problem, sequence, channel, -at);
  return load(problem.x, offset(problem.x, sequence.batch, sequence.begin + at, channel));
}

}  // namespace flashvar::causal_conv1d
