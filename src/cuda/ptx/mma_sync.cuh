// mma.sync m16n8k16: c += a b with 16-bit inputs and fp32 accumulation (sm_80 and newer).
//
// Register layout, with g = lane / 4 and t = lane % 4. a, in pairs of adjacent k: {row g, k 2t},
// {row g + 8, k 2t}, {row g, k 2t + 8}, {row g + 8, k 2t + 8}. b, likewise: {k 2t, col g},
// {k 2t + 8, col g}. c: {row g, col 2t}, {row g, col 2t + 1}, {row g + 8, col 2t},
// {row g + 8, col 2t + 1}.
#pragma once
#include <cstdint>

#include "core/dtype.cuh"

namespace flashvar::ptx {

template <class Dtype>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<dtype::bf16>(float (&c)[4], const uint32_t (&a)[4],
                                                          uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<dtype::fp16>(float (&c)[4], const uint32_t (&a)[4],
                                                          uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flashvar::ptx
