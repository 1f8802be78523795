// A thread's channel and its tokens, which lie beside each other, tile after tile.
#pragma once
#include <cstdint>

#include "causal_conv1d/sequences.cuh"
#include "causal_conv1d/tiles.h"
#include "core/chunk.cuh"

namespace flashvar::causal_conv1d {

// The same value, which the compiler does not find anew each time it is needed.
__device__ __forceinline__ int32_t kept(int32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The tiles of a block, `count` of all of a channel's from `first` on, and a thread's place in
// them.
struct TokenPlace {
  int32_t lane, lanes;
  int64_t chunk, channel;
  int64_t first, batch;  // the tile's number, and the row's
  int32_t tile;          // of the row
  int32_t count;
  int32_t own_tiles;  // those of a row in which the thread has tokens

  __device__ __forceinline__ TokenPlace(const Problem& problem, const TokenTiles& tiles,
                                        int elements)
      : lane(kept(threadIdx.x & (tiles.lanes() - 1))),
        lanes(kept(tiles.lanes())),
        chunk(blockIdx.x / tiles.channel_blocks),
        channel(int64_t{blockIdx.x % tiles.channel_blocks} * (kThreads >> tiles.lanes_log2) +
                (threadIdx.x >> tiles.lanes_log2)),
        first(chunk * tiles.tiles),
        batch(first / tiles.of_row),
        tile(static_cast<int32_t>(first - batch * tiles.of_row)),
        count(static_cast<int>(min(int64_t{tiles.tiles}, tiles.of_channel - first))),
        own_tiles(0) {
    if (channel >= problem.dim) return;
    int64_t const of_last = problem.seqlen - int64_t{tiles.of_row - 1} * lanes * elements;
    own_tiles = kept(lane * elements < of_last ? tiles.of_row : tiles.of_row - 1);
  }

  __device__ __forceinline__ bool exists() const { return own_tiles > 0; }
  // Whether some of the thread's elements are among the last kPast of the tile.
  template <int kPast, int kElements>
  __device__ __forceinline__ bool sees_next() const {
    return exists() && (lanes - lane - 1) * kElements < kPast;
  }
  __device__ __forceinline__ int64_t token(int32_t of_row, int elements) const {
    return (int64_t{of_row} * lanes + lane) * elements;
  }
};

// A thread's elements of tiles, which follow each other forward or backward, from one of the batch
// to the next. Threads of a block are in tiles of the same number.
template <class Dtype, int kElements>
class TileCursor {
  using Word = typename Dtype::Word;

 public:
  // At a tile of the block.
  __device__ __forceinline__ TileCursor(const Tensor& tensor, const TokenTiles& tiles,
                                        const TokenPlace& at, int32_t number)
      : tile(static_cast<int32_t>(static_cast<uint32_t>(at.tile + number) % tiles.of_row)),
        batch_(at.batch + static_cast<uint32_t>(at.tile + number) / tiles.of_row),
        of_row_(tiles.of_row),
        step_((kElements > 1 ? 1 : tensor.strides[1]) * (kElements << tiles.lanes_log2)),
        turn_(tensor.strides[0] - tiles.of_row * step_),
        data_(static_cast<Word*>(tensor.data) +
              offset(tensor, batch_, at.token(tile, kElements), at.channel)) {}

  int32_t tile;  // of the row

  __device__ __forceinline__ int64_t batch() const { return batch_; }
  __device__ __forceinline__ Word* data() const { return data_; }
  __device__ __forceinline__ Word* data_before() const { return data_ - step_; }

  __device__ __forceinline__ void advance() {
    bool const turns = ++tile == of_row_;
    data_ += step_ + (turns ? turn_ : 0);
    tile = turns ? 0 : tile;
    batch_ += turns;
  }
  __device__ __forceinline__ void retreat() {
    bool const turns = --tile < 0;
    data_ -= step_ + (turns ? turn_ : 0);
    tile = turns ? of_row_ - 1 : tile;
    batch_ -= turns;
  }

 private:
  int64_t batch_;
  int32_t of_row_;
  // To the next tile, and more from the last of a row to the first of the next.
  int64_t step_, turn_;
  Word* data_;
};

// Near which of a tile's elements sequences begin, and what is behind the last: found once for a
// block's tiles, whatever the channel. Bit i of a thread's is kPast - i places before its first
// element; kAfter: of places behind its last one.
template <int kPast, int kElements, int kAfter, int kTiles>
class Beginnings {
  static constexpr int kBits = kPast + kElements + kAfter;
  static_assert(kBits <= 16);

 public:
  struct Shared {
    uint16_t marks[kTiles * 32];
  };

  // All threads of the block call it.
  __device__ __forceinline__ Beginnings(Shared& shared, const Problem& problem,
                                        const TokenTiles& tiles, const TokenPlace& at)
      : marks_(shared.marks), index_(0) {
    if (is_packed(problem)) {
      int64_t const row = int64_t{at.tile} * at.lanes * kElements - kPast;
      index_ = find_together(problem, max(row, int64_t{0}));
    }
    for (int i = threadIdx.x; i < at.count << tiles.lanes_log2; i += kThreads) {
      int32_t const tile = (at.tile + (i >> tiles.lanes_log2)) % tiles.of_row;
      int64_t const token = (int64_t{tile} * at.lanes + (i & (at.lanes - 1))) * kElements;
      marks_[i] = token < problem.seqlen ? find_marks(problem, token) : 0;
    }
    __syncthreads();  // the marks are there
  }

  __device__ __forceinline__ uint32_t operator()(int tile, const TokenPlace& at) const {
    return marks_[tile * at.lanes + at.lane];
  }

  // The sequence of a token of the block's tiles.
  __device__ __forceinline__ Span span(const Problem& problem, int64_t batch, int64_t token) const {
    if (!is_packed(problem)) return {batch, batch, 0, problem.seqlen};
    return find(problem, token, index_);
  }

 private:
  __device__ __forceinline__ uint16_t find_marks(const Problem& problem, int64_t token) const {
    uint32_t marks = 0;
    auto mark = [&](int64_t row) {
      int64_t const bit = row - token + kPast;
      if (0 < bit && bit < kBits) marks |= 1u << bit;
    };
    Span one = span(problem, 0, max(token - kPast, int64_t{0}));
    mark(one.begin);
    while (one.end < token + kElements + kAfter) {
      mark(one.end);
      if (one.end >= problem.seqlen) break;
      one = span(problem, 0, one.end);
    }
    return static_cast<uint16_t>(marks);
  }

  uint16_t* marks_;
  int64_t index_;  // of the sequence of the first token that is seen
};

// The elements before a thread's own, which other lanes have: of this tile, or of the one before.
template <int kPast, class Dtype, int kElements>
__device__ __forceinline__ void take_before(const Chunk<Dtype, kElements>& own,
                                            const Chunk<Dtype, kElements>& before,
                                            const TokenPlace& at, float* values) {
  if constexpr (kElements == 1) {
    float mine[1], of_before[1];
    own.unpack(mine);
    before.unpack(of_before);
#pragma unroll
    for (int back = 1; back <= kPast; ++back) {
      float const sent = at.lane >= at.lanes - back ? of_before[0] : mine[0];
      values[kPast - back] =
          __shfl_sync(0xffffffffu, sent, (at.lane - back) & (at.lanes - 1), at.lanes);
    }
  } else {
    static_assert(kPast <= kElements);
    constexpr int kBytes = sizeof(typename Dtype::Word);
    constexpr int kWords = sizeof(own.words) / 4, kTaken = (kPast * kBytes + 3) / 4;
    Chunk<Dtype, kElements> taken{};
#pragma unroll
    for (int w = kWords - kTaken; w < kWords; ++w) {
      uint32_t const sent = at.lane == at.lanes - 1 ? before.words[w] : own.words[w];
      taken.words[w] = __shfl_sync(0xffffffffu, sent, (at.lane - 1) & (at.lanes - 1), at.lanes);
    }
    float all[kElements];
    taken.unpack(all);
#pragma unroll
    for (int k = 0; k < kPast; ++k) values[k] = all[kElements - kPast + k];
  }
}

// The thread's own elements, behind the kPast before them.
template <int kPast, class Dtype, int kElements>
__device__ __forceinline__ void unpack_behind(const Chunk<Dtype, kElements>& own,
                                              float (&values)[kPast + kElements]) {
  float all[kElements];
  own.unpack(all);
#pragma unroll
  for (int e = 0; e < kElements; ++e) values[kPast + e] = all[e];
}

// The values of elements behind a thread's own: of this tile, or of the one behind it, whose first
// are in `behind`.
template <int kPast, int kElements>
__device__ __forceinline__ void take_behind(const float (&own)[kElements],
                                            const float (&behind)[kElements == 1 ? 1 : kPast],
                                            const TokenPlace& at, float (&values)[kPast]) {
#pragma unroll
  for (int i = 0; i < kPast; ++i) {
    int const place = kElements == 1 ? 0 : i, lanes = kElements == 1 ? i + 1 : 1;
    float const sent = at.lane < lanes ? behind[place] : own[place];
    values[i] = __shfl_sync(0xffffffffu, sent, (at.lane + lanes) & (at.lanes - 1), at.lanes);
  }
}

// Calls f(e, past, newest) for each element: what its sequence has, and before it what its state
// has, or 0. `values` are those before a thread's own, and its own.
template <int kPast, int kElements, class Marks, class F>
__device__ __forceinline__ void each_token(const Problem& problem, const Marks& beginnings,
                                           uint32_t marks, int64_t batch, int64_t token,
                                           int64_t channel,
                                           const float (&values)[kPast + kElements], F f) {
  marks &= (1u << (kPast + kElements)) - 1;
  // Where there are states, elements go from one beginning to the next; else all at once.
  bool const has_states = problem.state.data != nullptr;
  uint32_t now = has_states ? 0 : marks, later = has_states ? marks : 0;
  float fresh[kPast] = {};
  int first = 0;
#pragma unroll 1
  while (true) {
    int const end = later == 0 ? kElements : max(__ffs(static_cast<int>(later)) - 1 - kPast, 0);
    float past[kPast] = {};
#pragma unroll
    for (int i = 0; i < kPast + kElements; ++i) {
#pragma unroll
      for (int k = 0; k < kPast; ++k) past[k] = (now >> i & 1) != 0 ? fresh[k] : past[k];
      int const e = i - kPast;
      if (e >= 0 && first <= e && e < end) f(e, past, values[i]);
#pragma unroll
      for (int k = 0; k + 1 < kPast; ++k) past[k] = past[k + 1];
      past[kPast - 1] = values[i];
    }
    if (later == 0) return;
    now = later & -later;
    later -= now;
    first = end;
    int64_t const begin = token - kPast + __ffs(static_cast<int>(now)) - 1;
    Span const span = beginnings.span(problem, batch, begin);
#pragma unroll
    for (int k = 0; k < kPast; ++k) fresh[k] = before(problem, span, channel, kPast - k);
  }
}

}  // namespace flashvar::causal_conv1d
