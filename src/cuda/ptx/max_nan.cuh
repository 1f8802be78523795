// max.NaN.f32: a maximum that is NaN where an operand is. fmaxf gives the other operand then.
#pragma once

namespace flashvar::ptx {

__device__ __forceinline__ float max_nan(float a, float b) {
  float max;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(a), "f"(b));
  return max;
}

}  // namespace flashvar::ptx
