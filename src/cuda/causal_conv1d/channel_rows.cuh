// Copies a tensor whose tokens are contiguous, or neither tokens nor channels, into one whose
// channels are. For the gradient of y, if it alone is laid out so: models that transpose or split y
// get it in another order than y's.
#pragma once
#include <cstdint>
#include <type_traits>

#include "causal_conv1d/tensors.cuh"
#include "causal_conv1d/tiles.h"
#include "core/ceil_div.h"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

struct ChannelRowsArgs {
  Tensor from;  // [batch, seqlen, dim]
  void* to;     // likewise, contiguous; dim is a multiple of the elements in 4 bytes
  int64_t seqlen, dim, token_tiles, channel_tiles;
  bool whole_words;  // `from` can be read 4 bytes at a time

  static ChannelRowsArgs make(const Problem& problem, const Tensor& from, void* to,
                              int element_bytes) {
    auto const address = reinterpret_cast<uintptr_t>(from.data);
    int const per_word = 4 / element_bytes;
    bool const aligned = from.strides[1] == 1 && address % 4 == 0 &&
                         from.strides[0] % per_word == 0 && from.strides[2] % per_word == 0;
    return {from,
            to,
            problem.seqlen,
            problem.dim,
            ceil_div(problem.seqlen, kCopyTile),
            ceil_div(problem.dim, kCopyTile),
            per_word == 1 || aligned};
  }
  int64_t blocks(const Problem& problem) const {
    return problem.batch * token_tiles * channel_tiles;
  }
};

// A word holds kPerWord tokens of one channel where it is read, as many channels of one token where
// it is written.
template <int kElementBytes>
__global__ void __launch_bounds__(kThreads)
    channel_rows_kernel(const __grid_constant__ ChannelRowsArgs args) {
  using Element = std::conditional_t<kElementBytes == 2, uint16_t, uint32_t>;
  constexpr int kPerWord = 4 / kElementBytes, kWords = kCopyTile / kPerWord;
  constexpr int kRowsAtOnce = kThreads / kWords, kRows = kCopyTile / kRowsAtOnce;
  // Rows of an odd number of words, so that words of a column are in different banks.
  __shared__ uint32_t tile[kCopyTile][kWords + 1];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the tensor
  int const word = threadIdx.x % kWords, row = threadIdx.x / kWords;
  int64_t const block = blockIdx.x, token_tile = block / args.channel_tiles;
  int64_t const batch = token_tile / args.token_tiles;
  int64_t const channel = (block - token_tile * args.channel_tiles) * kCopyTile;
  int64_t const token = (token_tile - batch * args.token_tiles) * kCopyTile;

  // All loads are issued before the first store to shared memory, which could be to the same place
  // as far as the compiler knows.
  int64_t const tokens = args.seqlen - token - word * kPerWord;
  const auto* const from = static_cast<const Element*>(args.from.data) +
                           offset(args.from, batch, token + word * kPerWord, channel);
  uint32_t loaded[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    int const c = row + i * kRowsAtOnce;
    if (channel + c >= args.dim) continue;
    const Element* const at = from + c * args.from.strides[2];
    if (args.whole_words && tokens >= kPerWord) {
      loaded[i] = *reinterpret_cast<const uint32_t*>(at);
    } else {
#pragma unroll
      for (int t = 0; t < kPerWord; ++t) {
        if (t < tokens) loaded[i] |= uint32_t{at[t * args.from.strides[1]]} << 16 * t;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) tile[row + i * kRowsAtOnce][word] = loaded[i];
  __syncthreads();  // the tile is loaded

  // A thread writes words of channels: `word` is one of a row of `to`, `i` a word of tokens.
  if (channel + word * kPerWord >= args.dim) return;
  auto* const to = static_cast<uint32_t*>(args.to) + (channel / kPerWord + word);
  int64_t const row_words = args.dim / kPerWord;
#pragma unroll
  for (int i = row; i < kWords; i += kRowsAtOnce) {
    int64_t const at = token + i * kPerWord;
    uint32_t* const row_at = to + (batch * args.seqlen + at) * row_words;
    if constexpr (kPerWord == 1) {
      if (at < args.seqlen) *row_at = tile[word][i];
    } else {
      uint32_t const even = tile[2 * word][i], odd = tile[2 * word + 1][i];
      if (at < args.seqlen) *row_at = (even & 0xffff) | odd << 16;
      if (at + 1 < args.seqlen) row_at[row_words] = even >> 16 | (odd & 0xffff0000);
    }
  }
}

}  // namespace flashvar::causal_conv1d
