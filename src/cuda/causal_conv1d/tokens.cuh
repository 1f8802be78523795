// A thread's channel and its tokens, which lie beside each other.
#pragma once
#include <cstdint>

#include "causal_conv1d/sequences.cuh"
#include "causal_conv1d/tiles.h"
#include "core/chunk.cuh"

namespace flashvar::causal_conv1d {

struct TokenPlace {
  int32_t lane;
  int64_t chunk, channel;

  __device__ __forceinline__ TokenPlace(const Problem& problem, const TokenTiles& tiles)
      : lane(threadIdx.x & ((1 << tiles.lanes_log2) - 1)) {
    int64_t const unit = unit_of(tiles, threadIdx.x);
    chunk = unit / problem.dim;
    channel = unit - chunk * problem.dim;
  }

  // Calls f(span, token) for the first token of each of the thread's chunks of elements, and the
  // sequence that it is in. All threads of a warp call it.
  template <class F>
  __device__ __forceinline__ void each_chunk(const Problem& problem, const TokenTiles& tiles,
                                             int elements, F f) const {
    int64_t index = 0;
    if (is_packed(problem)) {
      int64_t const first = unit_of(tiles, threadIdx.x & ~31u) / problem.dim;
      index = find_together(problem, (first * tiles.tiles << tiles.lanes_log2) * elements);
    }
    if (chunk >= tiles.chunks) return;
    int64_t number = chunk * tiles.tiles;
    int64_t const last = min(number + tiles.tiles, tiles.of_channel);
    int64_t batch = number / tiles.of_row, tile = number - batch * tiles.of_row;
    for (; number < last; ++number) {
      int64_t const token = ((tile << tiles.lanes_log2) + lane) * elements;
      if (token < problem.seqlen) {
        Span span{batch, batch, 0, problem.seqlen};
        if (is_packed(problem)) span = find(problem, token, index);
        index = span.index;
        f(span, token);
      }
      if (++tile == tiles.of_row) {
        tile = 0;
        ++batch;
      }
    }
  }

 private:
  static __device__ __forceinline__ int64_t unit_of(const TokenTiles& tiles, unsigned thread) {
    return int64_t{blockIdx.x} * (kThreads >> tiles.lanes_log2) + (thread >> tiles.lanes_log2);
  }
};

// The tokens of a channel of one of the batch.
template <class Dtype, int kElements>
struct TokenPointer {
  using C = Chunk<Dtype, kElements>;
  typename Dtype::Word* data;
  int64_t stride;  // 1 where there are several elements in a chunk
  int64_t seqlen;

  __device__ __forceinline__ TokenPointer(const Problem& problem, const Tensor& tensor,
                                          int64_t batch, int64_t channel)
      : data(static_cast<typename Dtype::Word*>(tensor.data) + offset(tensor, batch, 0, channel)),
        stride(tensor.strides[1]),
        seqlen(problem.seqlen) {}

  __device__ __forceinline__ void store(int64_t token, const float (&values)[kElements]) const {
    C chunk;
    chunk.pack(values);
    int64_t const count = seqlen - token;
    if (count >= kElements) {
      chunk.template store<true>(data + token * stride, 1);
    } else {
      chunk.template store<false>(data + token * stride, static_cast<int>(count));
    }
  }

  // values[i]: the element i - kBefore places from `token`, a multiple of kElements, up to
  // kElements
  // + kAfter of them; 0 where there are none. All loads are made before one is waited for.
  template <int kBefore, int kAfter>
  __device__ __forceinline__ void load(int64_t token,
                                       float (&values)[kBefore + kElements + kAfter]) const {
    constexpr int kChunksBefore = (kBefore + kElements - 1) / kElements;
    constexpr int kChunks = kChunksBefore + 1 + (kAfter + kElements - 1) / kElements;
    C chunks[kChunks];
    const auto* const first = data + token * stride;
    auto left = [&](int i) { return seqlen - token - (i - kChunksBefore) * kElements; };
    bool const whole = left(kChunks - 1) >= kElements;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      int const place = (i - kChunksBefore) * kElements;
      bool const begun = token + place >= 0;
      chunks[i].template load<true>(first + place * stride,
                                    begun && (whole || left(i) >= kElements));
    }
    if (!whole) {
#pragma unroll
      for (int i = kChunksBefore; i < kChunks; ++i) {
        if (0 >= left(i) || left(i) >= kElements) continue;
        chunks[i].template load<false>(first + (i - kChunksBefore) * kElements * stride,
                                       static_cast<int>(left(i)));
      }
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float chunk[kElements];
      chunks[i].unpack(chunk);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        int const place = kBefore + (i - kChunksBefore) * kElements + e;
        if (0 <= place && place < kBefore + kElements + kAfter) values[place] = chunk[e];
      }
    }
  }
};

}  // namespace flashvar::causal_conv1d
