// Element types as tags: kernels are instantiated for `dtype::bf16` and `dtype::fp16`; `Word` is
// the C++ type of an element in memory.
#pragma once
#include <cstdint>

namespace flashvar::dtype {

struct bf16 {
  static constexpr unsigned kAbi = 0;  // FLASHVAR_BF16
  using Word = uint16_t;

  // pack: two fp32 values, rounded to nearest even, as one 32-bit word with `lo` at the lower
  // address. pack_positive: the same, with negative values, -0 included, replaced by +0 (cvt.relu).
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
  }
  static __device__ __forceinline__ uint32_t pack_positive(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
  }

  static __device__ __forceinline__ float unpack(uint16_t value) {
    return __uint_as_float(static_cast<uint32_t>(value) << 16);
  }
};

struct fp16 {
  static constexpr unsigned kAbi = 1;  // FLASHVAR_FP16
  using Word = uint16_t;

  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
  }
  static __device__ __forceinline__ uint32_t pack_positive(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
  }

  static __device__ __forceinline__ float unpack(uint16_t value) {
    float unpacked;
    asm("cvt.f32.f16 %0, %1;" : "=f"(unpacked) : "h"(value));
    return unpacked;
  }
};

struct fp32 {
  static constexpr unsigned kAbi = 2;  // FLASHVAR_FP32
  using Word = float;

  static __device__ __forceinline__ float unpack(float value) { return value; }
};

}  // namespace flashvar::dtype
