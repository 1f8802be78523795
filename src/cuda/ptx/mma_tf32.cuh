// mma.sync m16n8k8 with tf32 inputs and fp32 accumulation: c += a b (sm_80 and newer).
//
// Register layout, with g = lane / 4 and t = lane % 4. a: {row g, k t}, {row g + 8, k t},
// {row g, k t + 4}, {row g + 8, k t + 4}. b: {k t, col g}, {k t + 4, col g}. c: as of m16n8k16
// (mma_sync.cuh).
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// Rounds to the ten bits of tf32's fraction.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flashvar::ptx
