// The dropout mask of P. It is a function of seed, offset and position (batch, head, query, key)
// alone, so that every kernel, tile shape and backend drops the same elements.
//
// One call of Philox 4x32 with 7 rounds (Salmon et al., 2011) gives eight 16-bit numbers, for the
// eight elements at rows r, r + 8 and columns c, c + 1, c + 8, c + 9 (c even) of a 16 x 16 block of
// P, where rows are queries and columns keys. In an mma accumulator whose rows are queries one
// thread holds these eight; where rows are keys (transposed scores) two threads do.
#pragma once
#include <cstdint>

namespace flashvar::attention {

inline constexpr int kPhiloxRounds = 7;  // the fewest that pass BigCrush (Salmon et al., 2011)

// Random bits of a thread's eight elements, 16 of each. query_half: 0 for query r, 1 for r + 8;
// key_half: 0 for key c, 1 for c + 8. parity: 0 for the first and 1 for the second of two adjacent
// accumulators, which are two keys or, with transposed scores, two queries.
struct DropoutBits {
  uint32_t word[4];  // [2 * query_half + parity]; lower 16 bits: key_half 0, upper: 1

  // Whether the element is kept. `threshold`: ScoreModifiers::dropout_threshold, in the upper 16
  // bits.
  __device__ __forceinline__ bool keeps(int query_half, int parity, int key_half,
                                        uint32_t threshold) const {
    uint32_t const both = word[2 * query_half + parity];
    return (key_half == 0 ? both << 16 : both) >= threshold;
  }
};

// Philox 4x32 of the counter c0 to c3; multipliers and key increments are those of the paper.
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

// Draws the random bits of one head of one batch entry.
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

  // For a thread whose accumulator rows are queries: bits of queries r, r + 8 and keys c, c + 1, c
  // + 8, c + 9. Precondition: r % 16 < 8, c % 16 < 8, c even.
  __device__ __forceinline__ DropoutBits draw(uint32_t r, uint32_t c) const {
    return philox(r / 16 * 8 + r % 8, c / 16 * 4 + c % 8 / 2, head_index, offset, key0, key1);
  }

  // For a thread whose accumulator rows are keys: bits of queries r, r + 1, r + 8, r + 9 (r even)
  // and keys c, c + 8. One Philox call covers the keys of two lanes, 4 apart: each lane calls it
  // for one of the two queries, then they exchange halves.
  __device__ __forceinline__ DropoutBits draw_transposed(uint32_t r, uint32_t c) const {
    bool const is_odd = c % 2 != 0;
    DropoutBits const mine = draw(is_odd ? r + 1 : r, c & ~1u);
    DropoutBits bits;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t const even_key = mine.word[2 * i], odd_key = mine.word[2 * i + 1];
      uint32_t const received = __shfl_xor_sync(0xffffffffu, is_odd ? even_key : odd_key, 4);
      bits.word[2 * i] = is_odd ? received : even_key;
      bits.word[2 * i + 1] = is_odd ? odd_key : received;
    }
    return bits;
  }
};

}  // namespace flashvar::attention
