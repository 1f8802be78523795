// Lanes of an m16n8 accumulator tile; reductions and a transpose among the four lanes of a quad,
// which hold the same two rows of it; reductions among all lanes of a warp.
#pragma once
#include <cstdint>

#include "ptx/special_registers.cuh"

namespace flashvar {

// Rows g and g + 8, columns 2 t and 2 t + 1 of its warp's tile belong to the lane.
struct Lane {
  int warp, g, t;  // warp: of its warpgroup

  explicit __device__ __forceinline__ Lane(uint32_t thread = threadIdx.x)
      : warp(static_cast<int>(thread) / 32 % 4),
        g(static_cast<int>(thread) % 32 / 4),
        t(static_cast<int>(thread) % 4) {}
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Sum over kLanes adjacent lanes. All of them get it, bit for bit the same.
template <int kLanes = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Before: each lane holds two adjacent columns, packed into one word, of each of four accumulator
// tiles. After: lane i of the quad holds all eight columns of tile i, which are 16 bytes that one
// store can write.
__device__ __forceinline__ uint4 transpose_quad(uint32_t (&word)[4]) {
  int const lane = ptx::thread_index() % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    bool const upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      uint32_t const sent = upper ? word[i] : word[i | bit];
      uint32_t const received = __shfl_xor_sync(0xffffffffu, sent, bit);
      (upper ? word[i] : word[i | bit]) = received;
    }
  }
  return {word[0], word[1], word[2], word[3]};
}

}  // namespace flashvar
