// What kernels of rows in the backward share: a record's vectors in shared memory, and sums.
#pragma once
#include <cstddef>
#include <cstdint>

#include "gated_delta_rule/grad_chunk.h"

namespace flashvar::gated_delta_rule {

// The vectors of a record in shared memory, in its order.
struct RecordRows {
  float a[kChunk], b[kChunk], c[kChunk];
  float decay, growth;
  float unused[kChunk - 2];
  float beta[kChunk], sums[kChunk], norm_q[kChunk], norm_k[kChunk];
};
static_assert(sizeof(RecordRows) == offsetof(GradRecord, inverse_low) - offsetof(GradRecord, a));

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// sum + the products of eight elements each.
template <class Dtype>
__device__ __forceinline__ float add_products_of(const uint4& one, const uint4& other, float sum) {
  uint32_t const words[2][4] = {{one.x, one.y, one.z, one.w}, {other.x, other.y, other.z, other.w}};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    sum = fmaf(Dtype::unpack(static_cast<uint16_t>(words[0][n])),
               Dtype::unpack(static_cast<uint16_t>(words[1][n])), sum);
    sum = fmaf(Dtype::unpack(static_cast<uint16_t>(words[0][n] >> 16)),
               Dtype::unpack(static_cast<uint16_t>(words[1][n] >> 16)), sum);
  }
  return sum;
}

}  // namespace flashvar::gated_delta_rule
