// Stands for src/cuda/ptx/mma_sync.cuh.
#pragma once
#include "core/dtype.cuh"
#include "device.h"

namespace flashvar::ptx {

// The operands of warps: a[row][k] and b[column][k].
struct MmaOperands {
  float a[16][16], b[8][16];
};
inline MmaOperands mma_operands[32];

template <class Dtype>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaOperands& warp = mma_operands[threadIdx.x / 32];
  uint32_t const g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  auto const write = [](float* to, uint32_t word) {
    to[0] = Dtype::unpack(static_cast<uint16_t>(word));
    to[1] = Dtype::unpack(static_cast<uint16_t>(word >> 16));
  };
  for (uint32_t i = 0; i < 4; ++i) write(&warp.a[g + i % 2 * 8][2 * t + i / 2 * 8], a[i]);
  write(&warp.b[g][2 * t], b0);
  write(&warp.b[g][2 * t + 8], b1);
  __syncwarp();
  for (uint32_t i = 0; i < 4; ++i) {
    const float* const row = warp.a[g + i / 2 * 8];
    const float* const column = warp.b[2 * t + i % 2];
    float sum = 0.f;
    for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
    c[i] += sum;
  }
  __syncwarp();
}

}  // namespace flashvar::ptx
