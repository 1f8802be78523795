// Iteration for tensors whose channels are contiguous: a thread's channels, and its rows from
// sequence to sequence.
#pragma once
#include <cstdint>

#include "causal_conv1d/sequences.cuh"
#include "causal_conv1d/tiles.h"
#include "core/vec.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/prefetch.cuh"

namespace flashvar::causal_conv1d {

// The rows of one sequence that a thread has: [first, last) of a batch entry.
struct Segment {
  Sequence sequence;
  int64_t first, last;
};

// The work of a thread: `rows` rows from `row` on, and its lane's channels.
struct ChannelWork {
  int32_t lane, group;
  int64_t row_block;      // of the grid
  int64_t first_channel;  // of the block
  int64_t row;            // the thread's first, counted over the whole batch
  int32_t rows;

  __device__ __forceinline__ ChannelWork(const Problem& problem, const ChannelTiles& tiles,
                                         int elements, uint32_t block = blockIdx.x)
      : lane(threadIdx.x & ((1 << tiles.lanes_log2) - 1)),
        group(threadIdx.x >> tiles.lanes_log2),
        row_block(block / tiles.column_blocks),
        first_channel(int64_t{block % tiles.column_blocks} *
                      (int64_t{elements} << tiles.lanes_log2)),
        row(row_of(tiles, group)),
        rows(static_cast<int>(
            min(int64_t{tiles.rows}, max(problem.batch * problem.seqlen - row, int64_t{0})))) {}

  // Calls f(segment) for each sequence that the thread has rows of, in order. Called by whole
  // warps.
  template <class F>
  __device__ __forceinline__ void for_each_segment(const Problem& problem,
                                                   const ChannelTiles& tiles, bool exists,
                                                   F f) const {
    int64_t index = 0;
    if (is_varlen(problem)) {
      int const first_of_warp = static_cast<int>(threadIdx.x & ~31u) >> tiles.lanes_log2;
      index = find_by_warp(problem, row_of(tiles, first_of_warp));
    }
    if (!exists) return;
    int64_t next = row;
    for (int left = rows; left > 0;) {
      Segment segment{};
      if (is_varlen(problem)) {
        segment.sequence = find(problem, next, index);
        segment.first = next;
      } else {
        int64_t const batch = next / problem.seqlen;
        segment.sequence = {batch, batch, 0, problem.seqlen};
        segment.first = next - batch * problem.seqlen;
      }
      index = segment.sequence.index;
      segment.last = min(segment.first + left, segment.sequence.end);
      f(segment);
      int const done = static_cast<int>(segment.last - segment.first);
      next += done;
      left -= done;
    }
  }

  // Has the first kRows rows brought into L2, of both tensors that the backward reads.
  template <class Dtype, int kRows>
  __device__ __forceinline__ void prefetch(const BwdProblem& problem, int64_t channel) const {
    int64_t const batch = row / problem.seqlen, first = row - batch * problem.seqlen;
    int64_t const left = min(int64_t{rows}, problem.seqlen - first);
    for (const Tensor* tensor : {&problem.x, &problem.grad_y}) {
      const auto* from = static_cast<const typename Dtype::Word*>(tensor->data) +
                         offset(*tensor, batch, first, channel);
#pragma unroll
      for (int i = 0; i < kRows; ++i, from += tensor->strides[1]) {
        if (i < left) ptx::prefetch_l2(from);
      }
    }
  }

 private:
  __device__ __forceinline__ int64_t row_of(const ChannelTiles& tiles, int of_group) const {
    return (row_block * (kThreads >> tiles.lanes_log2) + of_group) * tiles.rows;
  }
};

template <class Dtype>
__device__ __forceinline__ typename Dtype::Word* first_row(const Tensor& tensor,
                                                           const Segment& segment,
                                                           int64_t channel) {
  return static_cast<typename Dtype::Word*>(tensor.data) +
         offset(tensor, segment.sequence.batch, segment.first, channel);
}

// Reads a thread's channels of consecutive rows, with kStages rows in flight: by cp.async into
// slots of shared memory that are the thread's own, or into registers where they have fewer bytes
// than the 4 bytes of cp.async. The kernel commits one cp.async group for each row that it starts
// or reads.
template <class Dtype, int kElements, int kStages>
class RowReader {
  using V = Vec<Dtype, kElements>;
  using Word = typename Dtype::Word;
  static constexpr bool kCopies = V::kBytes >= 4;

 public:
  struct alignas(16) Shared {
    uint32_t words[kCopies ? kStages * kThreads * V::kBytes / 4 : 1];
  };

  __device__ __forceinline__ RowReader(Shared& shared, const Tensor& tensor, const Segment& segment,
                                       int64_t channel)
      : shared_(shared.words),
        next_(first_row<Dtype>(tensor, segment, channel)),
        stride_(tensor.strides[1]) {}

  // Starts the load of one of the first kStages rows; called before any row is read.
  __device__ __forceinline__ void start(int stage, bool exists) {
    if constexpr (kCopies) copy(stage, exists);
  }

  // Reads the next row, number `stage` modulo kStages. `left`: rows from it on.
  __device__ __forceinline__ void read(int stage, int left, float (&values)[kElements]) {
    V vec;
    if constexpr (kCopies) {
      memcpy(vec.words, slot(stage), V::kBytes);
    } else {
      if (stage == 0) {
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
          vecs_[i].template load<true>(next_, left - i);
          next_ += stride_;
        }
      }
      vec = vecs_[stage];
    }
    vec.unpack(values);
  }
  // Starts the load kStages rows after the row that was read.
  __device__ __forceinline__ void start_next(int stage, int left) {
    if constexpr (kCopies) copy(stage, left > kStages);
  }

 private:
  __device__ __forceinline__ uint32_t* slot(int stage) const {
    uint32_t* const words = shared_ + (stage * kThreads + threadIdx.x) * (V::kBytes / 4);
    return static_cast<uint32_t*>(__builtin_assume_aligned(words, V::kBytes));
  }
  __device__ __forceinline__ void copy(int stage, bool exists) {
    if (exists) ptx::cp_async<V::kBytes>(slot(stage), next_);
    next_ += stride_;
  }

  uint32_t* shared_;
  const Word* next_;
  int64_t stride_;
  V vecs_[kCopies ? 1 : kStages];
};

// Loads the kPast tokens before a segment, oldest first: of the sequence, else of its state, else
// 0.
template <class Dtype, int kPast, int kElements>
__device__ __forceinline__ void load_past(const Problem& problem, const Segment& segment,
                                          int64_t channel, float (&past)[kPast][kElements]) {
  Vec<Dtype, kElements> vecs[kPast];
  int64_t const seen = segment.first - segment.sequence.begin;
  const auto* const first = first_row<Dtype>(problem.x, segment, channel);
#pragma unroll
  for (int k = 0; k < kPast; ++k) {
    int const back = kPast - k;
    vecs[k].template load<true>(first - back * problem.x.strides[1], seen >= back);
  }
#pragma unroll
  for (int k = 0; k < kPast; ++k) {
    int const back = kPast - k;
    vecs[k].unpack(past[k]);
    if (seen >= back || problem.state.data == nullptr) continue;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      past[k][e] = state_token(problem, segment.sequence, channel + e, back - seen);
    }
  }
}

template <int kPast, int kElements>
__device__ __forceinline__ void shift(float (&past)[kPast][kElements],
                                      const float (&newest)[kElements]) {
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
#pragma unroll
    for (int k = 0; k + 1 < kPast; ++k) past[k][e] = past[k + 1][e];
    past[kPast - 1][e] = newest[e];
  }
}

// The convolution's result for a row, before the activation.
template <int kWidth, int kElements, class Filters>
__device__ __forceinline__ float convolved(const Filters& filters,
                                           const float (&past)[kWidth - 1][kElements], float newest,
                                           int e) {
  float z = filters.bias[e];
#pragma unroll
  for (int j = 0; j + 1 < kWidth; ++j) z = fmaf(filters.taps[j][e], past[j][e], z);
  return fmaf(filters.taps[kWidth - 1][e], newest, z);
}

}  // namespace flashvar::causal_conv1d
