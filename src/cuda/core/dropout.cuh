// Which weights dropout keeps: a function of the seed, the offset and the weight's place alone, the
// same in every kernel, tile and backend.
//
// Philox 4x32 with 7 rounds (Salmon et al., 2011) gives four words for four weights: those at
// rows r, r + 8 and columns c, c + 8 of a 16 x 16 patch, which is what one thread holds of mma
// accumulators in either orientation of the scores.
#pragma once
#include <cstdint>

namespace flashvar {

inline constexpr int kPhiloxRounds = 7;

struct PhiloxWords {
  uint32_t word[4];
};

__device__ __forceinline__ PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
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

// The words of one head of one batch entry.
struct DropoutWords {
  uint32_t key0, key1;
  uint32_t offset;
  uint32_t place;  // batch * heads_q + head

  __device__ __forceinline__ DropoutWords(const int64_t* rng, uint32_t place_)
      : key0(static_cast<uint32_t>(rng[0])),
        key1(static_cast<uint32_t>(static_cast<uint64_t>(rng[0]) >> 32)),
        offset(static_cast<uint32_t>(rng[1])),
        place(place_) {}

  // Of rows r, r + 8 and columns c, c + 8, where r % 16 and c % 16 are below 8: word[2 i + j] is
  // that of row r + 8 i and column c + 8 j.
  __device__ __forceinline__ PhiloxWords at(uint32_t r, uint32_t c) const {
    return philox(r / 16 * 8 + r % 8, c / 16 * 8 + c % 8, place, offset, key0, key1);
  }
};

}  // namespace flashvar
