// Atomic additions to global memory whose result nothing reads.
#pragma once

namespace flashvar::ptx {

__device__ __forceinline__ void global_add(float* global, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}

}  // namespace flashvar::ptx
