// max.NaN, which fmaxf is not.
#pragma once

namespace flashvar::ptx {

// NaN where one of them is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float max;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(a), "f"(b));
  return max;
}

}  // namespace flashvar::ptx
