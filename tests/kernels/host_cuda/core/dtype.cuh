// Stands for src/cuda/core/dtype.cuh: conversions in plain C++.
#pragma once
#include "device.h"

namespace flashvar::dtype {

struct bf16 {
  static constexpr unsigned kAbi = 0;
  using Word = uint16_t;

  static uint16_t round(float value) {
    if (value != value) return 0x7fff;
    uint32_t const bits = __float_as_uint(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static uint32_t pack(float lo, float hi) { return round(lo) | uint32_t{round(hi)} << 16; }
  static float unpack(uint16_t value) { return __uint_as_float(uint32_t{value} << 16); }
};

struct fp16 {
  static constexpr unsigned kAbi = 1;
  using Word = uint16_t;

  static uint16_t round(float value) { return bits_of<uint16_t>(static_cast<_Float16>(value)); }
  static uint32_t pack(float lo, float hi) { return round(lo) | uint32_t{round(hi)} << 16; }
  static float unpack(uint16_t value) { return bits_of<_Float16>(value); }
};

struct fp32 {
  static constexpr unsigned kAbi = 2;
  using Word = float;

  static float unpack(float value) { return value; }
};

}  // namespace flashvar::dtype
