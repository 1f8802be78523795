// X = N (I + diag(beta) N)^-1 of a strictly lower triangular N of 64 x 64, by one warp: the inverse
// (I + diag(beta) N)^-1 is I - diag(beta) X. Blocks of 16 x 16 on the diagonal by substitution in
// fp32, those below them by products of fp16 operands. Doubling the powers of N would be fewer
// steps, and wrong by whole digits for keys that are alike.
//
// Where keys are alike, X is what large sums leave. N is rounded to fp16 before anything is made of
// it: what is left of it by rounding would not cancel. Two left operands are split into two of fp16
// each for the same reason. What fp16 cannot hold becomes infinite, and X's rows with it.
#pragma once
#include <cstdint>

#include "core/dtype.cuh"
#include "core/quad.cuh"
#include "core/smem_layout.cuh"
#include "gated_delta_rule/chunk.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/vectors.cuh"

namespace flashvar::sm80::gated_delta_rule {

using namespace flashvar::gated_delta_rule;  // what all architectures share

inline constexpr int kBlock = 16;  // rows and columns of a block
inline constexpr int kBlocks = kChunk / kBlock;

// N in shared memory, as lanes of a warp read it.
struct KeyProducts {
  // Floats from row to row and from block to block: eight rows of a block, and a row of each of
  // four blocks, are read from different banks.
  static constexpr int kRow = kBlock + 4;
  static constexpr int kStride = kBlock * kRow + 8;
  static constexpr int kBelow = kBlocks * (kBlocks - 1) / 2;

  float diagonal[kBlocks][kStride];
  float4 below[kBelow][2][32];  // as accumulators, two tiles of 8 columns
  uint4 operands[kBelow][32];   // the same in fp16, as operand B

  // The number of the block in row i and column j of blocks, i > j.
  static __device__ __forceinline__ constexpr int index(int i, int j) {
    return i * (i - 1) / 2 + j;
  }

  // Stores the lane's two elements of row g of the tile of 8 x 8 in row m and column n of tiles. N
  // is the part of a symmetric matrix below the diagonal: the tiles above it give the transposes
  // that operand B is made of.
  __device__ __forceinline__ void put(int m, int n, float first, float second) {
    using fp16 = dtype::fp16;
    Lane const at;
    int const i = m / 2, j = n / 2, lane = 4 * at.g + at.t;
    uint32_t const word = fp16::pack(first, second);
    float2 const rounded = {fp16::unpack(static_cast<uint16_t>(word)),
                            fp16::unpack(static_cast<uint16_t>(word >> 16))};
    if (i > j) {
      reinterpret_cast<float2*>(&below[index(i, j)][n % 2][lane])[m % 2] = rounded;
    } else if (i < j) {
      reinterpret_cast<uint32_t*>(&operands[index(j, i)][lane])[m % 2 * 2 + n % 2] = word;
    } else {
      float* const row = diagonal[i] + (m % 2 * 8 + at.g) * kRow;
      *reinterpret_cast<float2*>(row + n % 2 * 8 + 2 * at.t) = rounded;
    }
  }
};

// What fp16 leaves of two numbers.
__device__ __forceinline__ uint32_t pack_rest(float first, float second) {
  uint32_t const word = dtype::fp16::pack(first, second);
  return dtype::fp16::pack(first - dtype::fp16::unpack(static_cast<uint16_t>(word)),
                           second - dtype::fp16::unpack(static_cast<uint16_t>(word >> 16)));
}

template <int kCount>
__device__ __forceinline__ void load_floats(float (&to)[kCount], const float* from) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float4 const four = *reinterpret_cast<const float4*>(from + i);
    to[i] = four.x;
    to[i + 1] = four.y;
    to[i + 2] = four.z;
    to[i + 3] = four.w;
  }
}

// Two rows of X in block lane / 8 on the diagonal: its row lane % 8, of which half the columns are
// 0, and the row eight below.
struct DiagonalRows {
  float upper[kBlock / 2], lower[kBlock];

  // Solves X = N - X diag(beta) N from the last column on.
  __device__ __forceinline__ DiagonalRows(const KeyProducts& products, const float* betas,
                                          int lane) {
    int const block = lane / 8, row = lane % 8;
    const float* const n = products.diagonal[block];
    float beta[kBlock];
    load_floats(beta, betas + kBlock * block);
    load_floats(upper, n + row * KeyProducts::kRow);
    load_floats(lower, n + (row + 8) * KeyProducts::kRow);
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      if (column >= row) upper[column] = lower[column + 8] = 0.f;
    }
#pragma unroll
    for (int known = kBlock - 1; known > 0; --known) {
      float const of_upper = known < 8 ? -beta[known] * upper[known % 8] : 0.f;
      float const of_lower = -beta[known] * lower[known];
#pragma unroll
      for (int first = 0; first < known; first += 4) {
        float four[4];
        load_floats(four, n + known * KeyProducts::kRow + first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const column = first + i;
          if (column >= known) break;
          lower[column] = fmaf(of_lower, four[i], lower[column]);
          if (known < 8) upper[column % 8] = fmaf(of_upper, four[i], upper[column % 8]);
        }
      }
    }
  }
};

// The matrix that X becomes, in shared memory. Where nothing of it is yet lie the blocks of X on
// the diagonal as operands of mma: above the diagonal, where it is 0 (which is written where the
// matrix is read), and in the last row of blocks.
struct SolutionMatrix {
  using Layout = SmemLayout<kChunk, kChunk>;
  uint32_t smem;

  // A lane's address of block (i, i) times -diag(beta), i > 0, as operand A with ldmatrix, and of
  // what fp16 leaves of it; of block (j, j), j < 3, as operand B with ldmatrix.trans.
  __device__ __forceinline__ uint32_t left(int i, int lane) const {
    return i < 3 ? fragment(i - 1, i + 1, lane) : fragment(0, 3, lane);
  }
  __device__ __forceinline__ uint32_t left_rest(int i, int lane) const {
    return fragment(3, i - 1, lane);
  }
  __device__ __forceinline__ uint32_t right(int j, int lane) const {
    return fragment(j, j + 1, lane);
  }

  // Stores eight elements of a row of block (i, i) as operands.
  __device__ __forceinline__ void put_operands(int i, int row, int column, const float (&x)[8],
                                               const float (&beta)[8]) const {
    using fp16 = dtype::fp16;
    auto store = [&](int of_rows, int of_columns, uint4 words) {
      ptx::shared_store(
          smem + Layout::chunk_offset(kBlock * of_rows + row, 2 * of_columns + column / 8), words);
    };
    if (i < 3) {
      store(i, i + 1,
            {fp16::pack(x[0], x[1]), fp16::pack(x[2], x[3]), fp16::pack(x[4], x[5]),
             fp16::pack(x[6], x[7])});
    }
    if (i == 0) return;
    float scaled[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) scaled[e] = -beta[e] * x[e];
    store(i < 3 ? i - 1 : 0, i < 3 ? i + 1 : 3,
          {fp16::pack(scaled[0], scaled[1]), fp16::pack(scaled[2], scaled[3]),
           fp16::pack(scaled[4], scaled[5]), fp16::pack(scaled[6], scaled[7])});
    store(3, i - 1,
          {pack_rest(scaled[0], scaled[1]), pack_rest(scaled[2], scaled[3]),
           pack_rest(scaled[4], scaled[5]), pack_rest(scaled[6], scaled[7])});
  }

 private:
  __device__ __forceinline__ uint32_t fragment(int i, int j, int lane) const {
    return smem + Layout::chunk_offset(kBlock * i + lane % 16, 2 * j + lane / 16);
  }
};

// A block's accumulators times -diag(beta), `beta` of the lane's columns, as operand A, and what
// fp16 leaves of it.
__device__ __forceinline__ void pack_left(uint32_t (&a)[4], const float (&x)[2][4],
                                          const float2 (&beta)[2], uint32_t* rest = nullptr) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float const first = -beta[n].x * x[n][2 * half], second = -beta[n].y * x[n][2 * half + 1];
      a[2 * n + half] = dtype::fp16::pack(first, second);
      if (rest != nullptr) rest[2 * n + half] = pack_rest(first, second);
    }
  }
}

__device__ __forceinline__ void multiply_block(float (&x)[2][4], const uint32_t (&left)[4],
                                               const uint32_t (&right)[4]) {
  ptx::mma_m16n8k16<dtype::fp16>(x[0], left, right[0], right[1]);
  ptx::mma_m16n8k16<dtype::fp16>(x[1], left, right[2], right[3]);
}

// Finds the blocks of X below the diagonal, when `matrix` has the operands, and passes their
// accumulators to finish(i, j, x), row of blocks by row of blocks:
//   X_ij = Y - Y diag(beta) X_jj,  Y = N_ij - the sum over k from j + 1 to i of X_ik diag(beta)
//   N_kj
template <class Finish>
__device__ __forceinline__ void solve_below(const KeyProducts& products,
                                            const SolutionMatrix& matrix, const float* beta,
                                            int lane, Finish&& finish) {
#pragma unroll
  for (int i = 1; i < kBlocks; ++i) {
    uint32_t left[kBlocks][4], left_rest[4];
    ptx::ldmatrix_x4(left[i], matrix.left(i, lane));
    ptx::ldmatrix_x4(left_rest, matrix.left_rest(i, lane));
    __syncwarp();  // what lay in the last row of blocks has been read
#pragma unroll
    for (int j = i - 1; j >= 0; --j) {
      float x[2][4];
      float2 betas[2];
      uint32_t right[kBlocks][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float4 const of = products.below[KeyProducts::index(i, j)][n][lane];
        x[n][0] = of.x, x[n][1] = of.y, x[n][2] = of.z, x[n][3] = of.w;
        betas[n] = *reinterpret_cast<const float2*>(beta + kBlock * j + 8 * n + lane % 4 * 2);
      }
#pragma unroll
      for (int k = i; k > j; --k) {
        uint4 const of = products.operands[KeyProducts::index(k, j)][lane];
        right[k][0] = of.x, right[k][1] = of.y, right[k][2] = of.z, right[k][3] = of.w;
      }
      ptx::ldmatrix_x4_trans(right[j], matrix.right(j, lane));
      multiply_block(x, left_rest, right[i]);
#pragma unroll
      for (int k = i; k > j; --k) multiply_block(x, left[k], right[k]);
      uint32_t rest[4];
      pack_left(left[j], x, betas, rest);
      multiply_block(x, rest, right[j]);
      multiply_block(x, left[j], right[j]);
      finish(i, j, x);
      if (j > 0) pack_left(left[j], x, betas);
    }
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
