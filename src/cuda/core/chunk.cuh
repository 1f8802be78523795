// 16 bytes of a row: what a thread of a kernel that is bound by memory loads at once, and as fp32.
#pragma once
#include <cstdint>
#include <cstring>

#include "core/dtype.cuh"

namespace flashvar {

template <class Dtype>
struct Chunk {
  using Word = typename Dtype::Word;
  static constexpr int kElements = 16 / sizeof(Word);

  uint4 bits;

  // `from`: the chunk's first element; kAligned: on 16 bytes, with all of the chunk in the row.
  // Else `count` elements are read, which may be 0 or less. Hint: the data is not read again.
  template <bool kAligned>
  __device__ __forceinline__ void load(const Word* from, int count) {
    if constexpr (kAligned) {
      bits = count > 0 ? __ldcs(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
    } else {
      Word words[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) words[i] = i < count ? from[i] : Word{0};
      memcpy(&bits, words, sizeof(bits));
    }
  }

  template <bool kAligned>
  __device__ __forceinline__ void store(Word* to, int count) const {
    if constexpr (kAligned) {
      if (count > 0) *reinterpret_cast<uint4*>(to) = bits;
    } else {
      Word words[kElements];
      memcpy(words, &bits, sizeof(bits));
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (i < count) to[i] = words[i];
      }
    }
  }

  __device__ __forceinline__ void unpack(float (&values)[kElements]) const {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Word) == 2) {
        values[2 * i] = Dtype::unpack(static_cast<uint16_t>(words[i]));
        values[2 * i + 1] = Dtype::unpack(static_cast<uint16_t>(words[i] >> 16));
      } else {
        values[i] = __uint_as_float(words[i]);
      }
    }
  }

  __device__ __forceinline__ void pack(const float (&values)[kElements]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Word) == 2) {
        words[i] = Dtype::pack(values[2 * i], values[2 * i + 1]);
      } else {
        words[i] = __float_as_uint(values[i]);
      }
    }
    bits = {words[0], words[1], words[2], words[3]};
  }
};

}  // namespace flashvar
