// fp32 constants and approximations.
#pragma once
#include <cstdint>

namespace flashvar {

inline constexpr float kLn2 = 0.693147180559945309417f;
inline constexpr float kLog2E = 1.44269504088896340736f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// 2^x, approximated; 2^-inf is 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + e^-x): the relative error is about 2^-21 for x >= -87; 0 below.
__device__ __forceinline__ float sigmoid_approx(float x) {
  return reciprocal_approx(1.f + exp2_approx(x * -kLog2E));
}

}  // namespace flashvar
