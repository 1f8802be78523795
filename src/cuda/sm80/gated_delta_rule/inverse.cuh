// (I + A)^-1 of a strictly lower triangular matrix of 64 x 64, by four warps: blocks of 8 x 8 on
// the diagonal by substitution in fp32, the blocks below them by tf32 products. Doubling the powers
// of A would be fewer steps, and wrong by whole digits for keys that are alike.
#pragma once
#include <cstdint>

#include "core/quad.cuh"
#include "gated_delta_rule/chunk.h"
#include "ptx/mma_tf32.cuh"

namespace flashvar::sm80::gated_delta_rule {

using namespace flashvar::gated_delta_rule;  // what all architectures share

// A matrix of fp32 in shared memory, rounded to tf32 where it is written. Rows are not a multiple
// of 128 bytes apart, so that the lanes of a fragment read different banks.
struct Matrix {
  static constexpr int kStride = kChunk + 4;
  static constexpr int kFloats = kChunk * kStride;
  float* data;

  __device__ __forceinline__ float at(int row, int col) const { return data[row * kStride + col]; }
  __device__ __forceinline__ Matrix block(int row, int col) const {
    return {data + row * kStride + col};
  }
  __device__ __forceinline__ float2 pair(int row, int col) const {
    return *reinterpret_cast<const float2*>(data + row * kStride + col);
  }
  __device__ __forceinline__ void set(int row, int col, float value) const {
    data[row * kStride + col] = __uint_as_float(ptx::to_tf32(value));
  }
  __device__ __forceinline__ void set_pair(int row, int col, float first, float second) const {
    *reinterpret_cast<float2*>(data + row * kStride + col) = {
        __uint_as_float(ptx::to_tf32(first)), __uint_as_float(ptx::to_tf32(second))};
  }
};

// c[16 x 8] += a[16 x 8 kSteps] b[8 kSteps x 8]; b(k, n) gives an element. With kUpperHalf rows 8
// to 15 of a are not read, and those of c mean nothing.
template <int kSteps, bool kUpperHalf = false, class B>
__device__ __forceinline__ void multiply(float (&c)[4], const Matrix& a, B b) {
  Lane const at;
#pragma unroll
  for (int k = 0; k < 8 * kSteps; k += 8) {
    auto const element = [&](int row, int col) { return __float_as_uint(a.at(row, col)); };
    uint32_t fragment[4] = {element(at.g, k + at.t), 0, element(at.g, k + at.t + 4), 0};
    if constexpr (!kUpperHalf) {
      fragment[1] = element(at.g + 8, k + at.t);
      fragment[3] = element(at.g + 8, k + at.t + 4);
    }
    ptx::mma_m16n8k8_tf32(c, fragment, __float_as_uint(b(k + at.t, at.g)),
                          __float_as_uint(b(k + at.t + 4, at.g)));
  }
}

// Inverts the warp's two blocks of 8 x 8 on the diagonal, 16 lanes in all: each has a column.
__device__ __forceinline__ void invert_diagonal(const Matrix& a, const Matrix& x) {
  int const lane = static_cast<int>(threadIdx.x) % 32, column = lane % 8;
  if (lane >= 16) return;
  Matrix const from = a.block(lane / 8 * 8, lane / 8 * 8), to = x.block(lane / 8 * 8, lane / 8 * 8);
  float value[8];
#pragma unroll
  for (int row = 0; row < 8; ++row) value[row] = row == column ? 1.f : 0.f;
#pragma unroll
  for (int known = 0; known < 7; ++known) {
#pragma unroll
    for (int row = known + 1; row < 8; ++row) {
      value[row] = fmaf(-from.at(row, known), value[known], value[row]);
    }
  }
#pragma unroll
  for (int row = 0; row < 8; ++row) to.set(row, column, value[row]);
}

// Columns `column` to `column` + 7 of the block below two inverted blocks of kSize x kSize:
//   x = -lower a upper.
// One warp; `columns`: kSize x 8 floats of its own.
template <int kSize>
__device__ __forceinline__ void invert_below(const Matrix& a, const Matrix& lower,
                                             const Matrix& upper, const Matrix& x, int column,
                                             float* columns) {
  constexpr bool kUpperHalf = kSize == 8;
  constexpr int kSteps = kSize / 8;
  Lane const at;
#pragma unroll
  for (int row = 0; row < kSize; row += 16) {
    float product[4] = {};
    multiply<kSteps, kUpperHalf>(product, a.block(row, 0),
                                 [&](int k, int n) { return upper.at(k, column + n); });
#pragma unroll
    for (int half = 0; half < (kUpperHalf ? 1 : 2); ++half) {
      float2& pair = *reinterpret_cast<float2*>(columns + (row + at.g + 8 * half) * 8 + 2 * at.t);
      pair = {__uint_as_float(ptx::to_tf32(product[2 * half])),
              __uint_as_float(ptx::to_tf32(product[2 * half + 1]))};
    }
  }
  __syncwarp();  // the warp's columns of a upper are there
#pragma unroll
  for (int row = 0; row < kSize; row += 16) {
    float product[4] = {};
    multiply<kSteps, kUpperHalf>(product, lower.block(row, 0),
                                 [&](int k, int n) { return columns[k * 8 + n]; });
    x.set_pair(row + at.g, column + 2 * at.t, -product[0], -product[1]);
    if constexpr (!kUpperHalf) {
      x.set_pair(row + at.g + 8, column + 2 * at.t, -product[2], -product[3]);
    }
  }
}

// x = (I + a)^-1. Of `a` only what lies below the diagonal is read; of `x` what lies above the
// diagonal blocks of 32 x 32 is not written. The four warps of the block call it; `scratch`: 1024
// floats. Ends with a barrier.
__device__ __forceinline__ void invert(const Matrix& a, const Matrix& x, float* scratch) {
  int const warp = static_cast<int>(threadIdx.x) / 32;
  float* const columns = scratch + warp * 256;
  Lane const at;
  {  // a block of 16 x 16 for each warp
    Matrix const from = a.block(16 * warp, 16 * warp), to = x.block(16 * warp, 16 * warp);
    invert_diagonal(from, to);
    to.set_pair(at.g, 8 + 2 * at.t, 0.f, 0.f);
    __syncwarp();  // both blocks of 8 x 8 are inverted; the zeros are overwritten by none of them
    invert_below<8>(from.block(8, 0), to.block(8, 8), to, to.block(8, 0), 0, columns);
  }
  __syncthreads();  // all blocks of 16 x 16 are inverted
  int const half = warp / 2 * 32, column = warp % 2 * 8;
  x.set_pair(half + at.g, half + 16 + column + 2 * at.t, 0.f, 0.f);
  x.set_pair(half + at.g + 8, half + 16 + column + 2 * at.t, 0.f, 0.f);
  invert_below<16>(a.block(half + 16, half), x.block(half + 16, half + 16), x.block(half, half),
                   x.block(half + 16, half), column, columns);
  __syncthreads();  // both blocks of 32 x 32 are inverted
  invert_below<32>(a.block(32, 0), x.block(32, 32), x.block(0, 0), x.block(32, 0), warp * 8,
                   columns);
  __syncthreads();  // x is complete
}

}  // namespace flashvar::sm80::gated_delta_rule
