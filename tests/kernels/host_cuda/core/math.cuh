// Stands for src/cuda/core/math.cuh: the host's own functions for the approximations.
#pragma once
#include "device.h"

namespace flashvar {

inline constexpr float kLn2 = 0.693147180559945309417f;
inline constexpr float kLog2E = 1.44269504088896340736f;

inline float infinity() { return __int_as_float(0x7f800000); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline float sigmoid_approx(float x) { return 1.f / (1.f + std::exp(-x)); }

}  // namespace flashvar
