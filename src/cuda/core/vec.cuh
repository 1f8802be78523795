// Vec: contiguous elements that a thread loads or stores at once, and their conversion to fp32. The
// dot product of such elements.
#pragma once
#include <cstdint>
#include <cstring>

#include "core/dtype.cuh"
#include "ptx/global_store.cuh"

namespace flashvar {

// kElements: a power of two; they have at most 16 bytes.
template <class Dtype, int kElements_ = 16 / sizeof(typename Dtype::Word)>
struct Vec {
  using Word = typename Dtype::Word;
  static constexpr int kElements = kElements_;
  static constexpr int kBytes = kElements * sizeof(Word);

  uint32_t words[(kBytes + 3) / 4];

  // Loads the elements at `from`. kAligned: `from` is aligned to the size of all of them, which are
  // read at once if `count` > 0, with the hint that they are not read again. Otherwise the first
  // `count` elements are read one by one. Elements that are not read become 0.
  template <bool kAligned>
  __device__ __forceinline__ void load(const Word* from, int count) {
    if constexpr (!kAligned) {
      Word single[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) single[i] = i < count ? from[i] : Word{0};
      set(single);
    } else if constexpr (kBytes == 16) {
      set(count > 0 ? __ldcs(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0});
    } else if constexpr (kBytes == 8) {
      set(count > 0 ? __ldcs(reinterpret_cast<const uint2*>(from)) : uint2{0, 0});
    } else if constexpr (kBytes == 4) {
      set(count > 0 ? __ldcs(reinterpret_cast<const uint32_t*>(from)) : uint32_t{0});
    } else {
      set(count > 0 ? __ldcs(from) : Word{0});
    }
  }

  // Stores the elements to `to`. kAligned: all of them if `count` > 0; otherwise the first `count`,
  // one by one.
  template <bool kAligned>
  __device__ __forceinline__ void store(Word* to, int count) const {
    if constexpr (!kAligned) {
      Word single[kElements];
      memcpy(single, words, kBytes);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (i < count) to[i] = single[i];
      }
    } else if (count > 0) {
      if constexpr (kBytes == 16) {
        ptx::global_store(to, uint4{words[0], words[1], words[2], words[3]});
      } else if constexpr (kBytes == 8) {
        *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
      } else if constexpr (kBytes == 4) {
        *reinterpret_cast<uint32_t*>(to) = words[0];
      } else {
        *to = static_cast<Word>(words[0]);
      }
    }
  }

  __device__ __forceinline__ void unpack(float (&values)[kElements]) const {
    if constexpr (sizeof(Word) == 4) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) values[i] = __uint_as_float(words[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        values[i] = Dtype::unpack(static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2)));
      }
    }
  }

  __device__ __forceinline__ void pack(const float (&values)[kElements]) {
    if constexpr (sizeof(Word) == 4) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) words[i] = __float_as_uint(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; i += 2) {
        words[i / 2] = Dtype::pack(values[i], i + 1 < kElements ? values[i + 1] : 0.f);
      }
    }
  }

 private:
  template <class Bits>
  __device__ __forceinline__ void set(const Bits& bits) {
    static_assert(sizeof(Bits) == kBytes);
    memcpy(words, &bits, kBytes);
  }
};

// sum + the dot product of eight 16-bit elements.
template <class Dtype>
__device__ __forceinline__ float add_products_of(const uint4& one, const uint4& other, float sum) {
  uint32_t const words[2][4] = {{one.x, one.y, one.z, one.w}, {other.x, other.y, other.z, other.w}};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    sum = fmaf(Dtype::unpack(static_cast<uint16_t>(words[0][n])),
               Dtype::unpack(static_cast<uint16_t>(words[1][n])), sum);
    sum = fmaf(Dtype::unpack(static_cast<uint16_t>(words[0][n] >> 16)),
               Dtype::unpack(static_cast<uint16_t>(words[1][n] >> 16)), sum);
  }
  return sum;
}

}  // namespace flashvar
