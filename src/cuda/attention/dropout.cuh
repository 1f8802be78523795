// The dropout mask: a function of seed, offset and the position (batch, head, query, key) alone, so
// that every kernel, tile shape and backend drops the same elements of P.
//
// One call of Philox 4x32 with 7 rounds (Salmon et al., 2011) gives eight half words, for the eight
// elements at rows r, r + 8 and columns c, c + 1, c + 8, c + 9 (c even) of a 16 x 16 fragment.
// Where rows are queries one thread holds these eight in mma accumulators; where rows are keys
// (transposed scores) two threads do.
#pragma once
#include <cstdint>

namespace flashvar::attention {

inline constexpr int kPhiloxRounds = 7;

// The half words of a thread's eight elements. Parity: even or odd column; with transposed scores,
// where two queries are adjacent registers of a thread, even or odd query.
struct DropoutBits {
  uint32_t word[4];  // [2 * row half + parity]; the upper half word is that of column half 1

  // `threshold`: a half word in the upper 16 bits.
  __device__ __forceinline__ bool keeps(int row_half, int parity, int column_half,
                                        uint32_t threshold) const {
    uint32_t const both = word[2 * row_half + parity];
    return (column_half == 0 ? both << 16 : both) >= threshold;
  }
};

__device__ __forceinline__ DropoutBits philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                              uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    uint32_t const high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    uint32_t const high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ key0;
    c1 = low1;
    c2 = high0 ^ c3 ^ key1;
    c3 = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The random bits of one head of one batch entry.
struct DropoutRng {
  uint32_t key0, key1;
  uint32_t offset;
  uint32_t head_index;  // batch * heads_q + head

  DropoutRng() = default;
  __device__ __forceinline__ DropoutRng(const int64_t* rng, uint32_t head_index_)
      : key0(static_cast<uint32_t>(rng[0])),
        key1(static_cast<uint32_t>(static_cast<uint64_t>(rng[0]) >> 32)),
        offset(static_cast<uint32_t>(rng[1])),
        head_index(head_index_) {}

  // Rows are queries: the thread holds columns c and c + 1. Precondition: r % 16 < 8, c % 16 < 8,
  // c even.
  __device__ __forceinline__ DropoutBits draw(uint32_t r, uint32_t c) const {
    return philox(r / 16 * 8 + r % 8, c / 16 * 4 + c % 8 / 2, head_index, offset, key0, key1);
  }

  // Rows are keys: the thread holds queries r and r + 1 (r even) of key column c. One Philox call
  // covers the columns of two lanes: each computes one of the two queries, then they exchange
  // halves.
  __device__ __forceinline__ DropoutBits draw_transposed(uint32_t r, uint32_t c) const {
    bool const odd = c % 2 != 0;
    DropoutBits const mine = draw(odd ? r + 1 : r, c & ~1u);
    DropoutBits bits;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t const even = mine.word[2 * i], uneven = mine.word[2 * i + 1];
      uint32_t const received = __shfl_xor_sync(0xffffffffu, odd ? even : uneven, 4);
      bits.word[2 * i] = odd ? received : even;
      bits.word[2 * i + 1] = odd ? uneven : received;
    }
    return bits;
  }
};

}  // namespace flashvar::attention
