// A thread's channels, which lie beside each other, and its rows, from sequence to sequence.
#pragma once
#include <cstdint>

#include "causal_conv1d/sequences.cuh"
#include "causal_conv1d/tiles.h"
#include "core/chunk.cuh"

namespace flashvar::causal_conv1d {

// Rows of a sequence that a thread has: [first, last) of one of the batch.
struct Segment {
  Span span;
  int64_t first, last;
};

struct ChannelPlace {
  int32_t lane, group;
  int64_t row_block;
  int64_t first_channel;  // of the block
  int64_t row, last_row;  // of the thread: rows of all of the batch

  __device__ __forceinline__ ChannelPlace(const Problem& problem, const ChannelTiles& tiles,
                                          int elements)
      : lane(threadIdx.x & ((1 << tiles.lanes_log2) - 1)),
        group(threadIdx.x >> tiles.lanes_log2),
        row_block(blockIdx.x / tiles.column_blocks),
        first_channel(int64_t{blockIdx.x % tiles.column_blocks} *
                      (int64_t{elements} << tiles.lanes_log2)),
        row(row_of(tiles, group)),
        last_row(min(row + tiles.rows, problem.batch * problem.seqlen)) {}

  // Calls f(segment) for each of the thread's sequences, in order. All threads of a warp call it.
  template <class F>
  __device__ __forceinline__ void each_segment(const Problem& problem, const ChannelTiles& tiles,
                                               bool exists, F f) const {
    int64_t index = 0;
    if (is_packed(problem)) {
      int const first_of_warp = static_cast<int>(threadIdx.x & ~31u) >> tiles.lanes_log2;
      index = find_together(problem, row_of(tiles, first_of_warp));
    }
    if (!exists) return;
    for (int64_t next = row; next < last_row;) {
      Segment segment{};
      if (is_packed(problem)) {
        segment.span = find(problem, next, index);
        segment.first = next;
      } else {
        int64_t const batch = next / problem.seqlen;
        segment.span = {batch, batch, 0, problem.seqlen};
        segment.first = next - batch * problem.seqlen;
      }
      index = segment.span.index;
      segment.last = min(segment.first + (last_row - next), segment.span.end);
      f(segment);
      next += segment.last - segment.first;
    }
  }

 private:
  __device__ __forceinline__ int64_t row_of(const ChannelTiles& tiles, int of_group) const {
    return (row_block * (kThreads >> tiles.lanes_log2) + of_group) * tiles.rows;
  }
};

// A thread's channels of the rows of a segment, one row after the other.
template <class Dtype, int kElements>
struct RowPointer {
  using C = Chunk<Dtype, kElements>;
  typename Dtype::Word* data;
  int64_t stride;

  __device__ __forceinline__ RowPointer(const Tensor& tensor, const Segment& segment,
                                        int64_t channel)
      : data(static_cast<typename Dtype::Word*>(tensor.data) +
             offset(tensor, segment.span.batch, segment.first, channel)),
        stride(tensor.strides[1]) {}

  // The next kRows rows; those behind the next `rows` are 0.
  template <int kRows>
  __device__ __forceinline__ void load(C (&chunks)[kRows], int rows) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      chunks[u].template load<true>(data, rows - u);
      data += stride;
    }
  }
  // Writes the next row.
  __device__ __forceinline__ void store(const float (&values)[kElements]) {
    C chunk;
    chunk.pack(values);
    chunk.template store<true>(data, 1);
    data += stride;
  }
};

// The kPast tokens before a segment, the oldest first.
template <int kPast, int kElements>
__device__ __forceinline__ void load_past(const Problem& problem, const Segment& segment,
                                          int64_t channel, float (&past)[kPast][kElements]) {
#pragma unroll
  for (int k = 0; k < kPast; ++k) {
    int64_t const at = segment.first - segment.span.begin - (kPast - k);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      past[k][e] = token(problem, segment.span, channel + e, at);
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

// What the activation of a row gets.
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
