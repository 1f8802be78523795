// Computes X = N (I + diag(beta) N)^-1 of a strictly lower triangular 64 x 64 matrix N, by one
// warp; then (I + diag(beta) N)^-1 = I - diag(beta) X. The 16 x 16 blocks on the diagonal are
// solved by substitution in fp32, the blocks below them by GEMMs of fp16 operands. Repeated
// squaring of N would take fewer steps, but loses digits where keys are nearly equal.
//
// There the elements of X are small differences of large sums. Therefore N is rounded to fp16
// before any use, so that every use sees the same values and the sums cancel; and two left operands
// are split into a high and a low part. Values beyond fp16's range become inf, and X's rows inf or
// NaN.
#pragma once
#include <cstdint>

#include "core/dtype.cuh"
#include "core/quad.cuh"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/triangle.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/smem_address.cuh"
#include "ptx/vectors.cuh"

namespace flashvar::sm80::gated_delta_rule {

using namespace flashvar::gated_delta_rule;  // what all architectures share

inline constexpr int kBlock = 16;  // rows and columns of a block
inline constexpr int kBlocks = kChunk / kBlock;

// The lower triangle of N in shared memory.
struct KeyProducts {
  // Stride in floats between blocks on the diagonal, such that the same row of each of them lies in
  // different banks.
  static constexpr int kStride = kBlock * kBlock + 8;

  float diagonal[kBlocks][kStride];
  // Blocks below the diagonal, in fp16, each as four 8 x 8 tiles in the order of operand B's
  // registers.
  uint32_t below[kBlocks * (kBlocks - 1) / 2][4][32];

  // Offset in a block on the diagonal of four elements of a row. They are permuted so that four
  // rows of eight elements, and eight rows of four, lie in different banks.
  static __device__ __forceinline__ constexpr int offset(int row, int four) {
    return kBlock * row + 4 * (four ^ (row / 2 % 2 * 2 + row / 4 % 2));
  }
  static __device__ __forceinline__ constexpr int index(int i, int j) {
    return i * (i - 1) / 2 + j;
  }

  // Loads block (i, j), i > j, as operand B.
  __device__ __forceinline__ void load(uint32_t (&b)[4], int i, int j, int lane_id) const {
    ptx::ldmatrix_x4_trans(b, ptx::smem_address(&below[index(i, j)][0][4 * lane_id]));
  }
};

// Addresses to which a lane stores its elements, those of row g, of the 8 x 8 tiles (m, n) of N, n
// <= m.
class TileRowAddresses {
  int first_on_diagonal;  // first of the tiles in the block on the diagonal
  uint32_t* below;        // tile (m, 0)
  float* diagonal[2];     // its two tiles

 public:
  __device__ __forceinline__ TileRowAddresses(KeyProducts& products, int m, const Lane& lane)
      : first_on_diagonal(m / 2 * 2),
        below(&products.below[KeyProducts::index(m / 2, 0)][m % 2][4 * lane.g + lane.t]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      diagonal[n] = products.diagonal[m / 2] +
                    KeyProducts::offset(m % 2 * 8 + lane.g, 2 * n + lane.t / 2) + lane.t % 2 * 2;
    }
  }

  __device__ __forceinline__ void put(int n, float first, float second) const {
    using fp16 = dtype::fp16;
    uint32_t const word = fp16::pack(first, second);
    if (n < first_on_diagonal) {
      below[2 * 32 * n] = word;
    } else {
      *reinterpret_cast<float2*>(diagonal[n % 2]) = {
          fp16::unpack(static_cast<uint16_t>(word)),
          fp16::unpack(static_cast<uint16_t>(word >> 16))};
    }
  }
};

// The low parts of two values, packed in fp16.
__device__ __forceinline__ uint32_t pack_low_fp16(float first, float second) {
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

// The lane's two rows of X in diagonal block lane / 8: row lane % 8, whose second half of columns
// is 0, and the row eight below it.
struct DiagonalRows {
  float upper[kBlock / 2], lower[kBlock];

  // Solves X = N - X diag(beta) N by substitution, last column first.
  __device__ __forceinline__ DiagonalRows(const KeyProducts& products, const float* minus_betas,
                                          int lane_id) {
    int const block = lane_id / 8, row = lane_id % 8;
    const float* const n = products.diagonal[block];
    float minus_beta[kBlock];
    load_floats(minus_beta, minus_betas + kBlock * block);
    load_row(upper, n, row);
    load_row(lower, n, row + 8);
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      if (column >= row) upper[column] = lower[column + 8] = 0.f;
    }
#pragma unroll
    for (int known = kBlock - 2; known > 0; --known) {    // the last column is 0
      bool const changes_upper = known < kBlock / 2 - 1;  // likewise of the upper row
      float const upper_factor = changes_upper ? minus_beta[known] * upper[known % 8] : 0.f;
      float const lower_factor = minus_beta[known] * lower[known];
#pragma unroll
      for (int first = 0; first < known; first += 4) {
        float four[4];
        load_floats(four, n + KeyProducts::offset(known, first / 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const column = first + i;
          if (column >= known) break;
          lower[column] = fmaf(lower_factor, four[i], lower[column]);
          if (changes_upper) upper[column % 8] = fmaf(upper_factor, four[i], upper[column % 8]);
        }
      }
    }
  }

 private:
  template <int kCount>
  static __device__ __forceinline__ void load_row(float (&to)[kCount], const float* block,
                                                  int row) {
#pragma unroll
    for (int first = 0; first < kCount; first += 4) {
      float four[4];
      load_floats(four, block + KeyProducts::offset(row, first / 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) to[first + i] = four[i];
    }
  }
};

// The result matrix in shared memory: a Triangle, followed by the quarter that a Triangle leaves
// out. Its 4 x 4 blocks of 16 tokens:
//   X00  A1   A2   A3     A, a: I - X_ii diag(beta), i = 1 to 3, as operand A of mma, split into a
//   X10  X11  a1   a2        high part A (left) and a low part a (left_low)
//   X20  X21  X22  a3     B: X_jj, j = 0 to 2, as operand B (right), until the last row of the
//   B0   B1   B2   X33       result is written
struct SolutionMatrix {
  static constexpr int kBytes = 2 * kChunk * kChunk;
  uint32_t smem;

  // Byte offset of a 16-byte unit.
  static __device__ __forceinline__ uint32_t unit_offset(uint32_t row, uint32_t unit) {
    uint32_t const half_bytes = row < kChunk / 2 ? Triangle::kBytes : Triangle::kColBlockBytes;
    return Triangle::unit_offset(row, unit % 4) + unit / 4 * half_bytes;
  }

  // Blocks of operands.
  struct Block {
    int i, j;
  };
  static __device__ __forceinline__ constexpr Block left(int i) { return {0, i}; }
  static __device__ __forceinline__ constexpr Block left_low(int i) {
    return {i < 3 ? 1 : 2, i < 3 ? i + 1 : 3};
  }
  static __device__ __forceinline__ constexpr Block right(int j) { return {3, j}; }

  // The lane's ldmatrix address of a block.
  __device__ __forceinline__ uint32_t fragment(const Block& block, int lane_id) const {
    return smem + unit_offset(kBlock * block.i + lane_id % 16, 2 * block.j + lane_id / 16);
  }

  // Writes the zeros of a Triangle over the operands above the diagonal.
  __device__ __forceinline__ void clear_operands(int lane_id) const {
    ptx::shared_store(fragment({0, 1}, lane_id), uint4{});
    ptx::shared_store(fragment({2, 3}, lane_id), uint4{});
  }
};

// Addresses to which a lane stores its rows of diagonal block lane / 8: of the first eight elements
// of the upper row, in the result and in the operands.
class DiagonalAddresses {
  uint32_t result, right, left, left_low;
  int row;
  bool has_right, has_left;

 public:
  __device__ __forceinline__ DiagonalAddresses(const SolutionMatrix& matrix, int lane_id)
      : row(lane_id % 8), has_right(lane_id / 8 < kBlocks - 1), has_left(lane_id / 8 > 0) {
    int const block = lane_id / 8;
    auto address_of = [&](const SolutionMatrix::Block& at) {
      return matrix.smem + SolutionMatrix::unit_offset(kBlock * at.i + row, 2 * at.j);
    };
    result = address_of({block, block});
    right = address_of(SolutionMatrix::right(block));
    left = address_of(SolutionMatrix::left(block));
    left_low = address_of(SolutionMatrix::left_low(block));
  }

  // Stores eight elements as operands: columns 8 * unit to 8 * unit + 7 of the upper or the lower
  // row. `minus_beta`: of these columns.
  __device__ __forceinline__ void put_operands(bool lower, int unit, const float (&x)[8],
                                               const float (&minus_beta)[8]) const {
    using fp16 = dtype::fp16;
    float scaled[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      bool const on_diagonal = lower == (unit != 0) && e == row;
      scaled[e] = on_diagonal ? 1.f : minus_beta[e] * x[e];
    }
    if (has_right) {
      put(right, lower, unit,
          {fp16::pack(x[0], x[1]), fp16::pack(x[2], x[3]), fp16::pack(x[4], x[5]),
           fp16::pack(x[6], x[7])});
    }
    if (has_left) {
      put(left, lower, unit,
          {fp16::pack(scaled[0], scaled[1]), fp16::pack(scaled[2], scaled[3]),
           fp16::pack(scaled[4], scaled[5]), fp16::pack(scaled[6], scaled[7])});
      put(left_low, lower, unit,
          {pack_low_fp16(scaled[0], scaled[1]), pack_low_fp16(scaled[2], scaled[3]),
           pack_low_fp16(scaled[4], scaled[5]), pack_low_fp16(scaled[6], scaled[7])});
    }
  }

  // Likewise zeros.
  __device__ __forceinline__ void put_zeros(bool lower, int unit) const {
    put(result, lower, unit, uint4{});
    if (has_right) put(right, lower, unit, uint4{});
    if (has_left) {
      put(left, lower, unit, uint4{});
      put(left_low, lower, unit, uint4{});
    }
  }

  __device__ __forceinline__ void put_result(bool lower, int unit, uint4 words) const {
    put(result, lower, unit, words);
  }
  // Stores the result's element on the diagonal.
  __device__ __forceinline__ void put_diagonal(bool lower, uint16_t word) const {
    ptx::shared_store(address(result, lower, lower ? 1 : 0) + 2 * row, word);
  }

 private:
  static __device__ __forceinline__ uint32_t address(uint32_t first, bool lower, int unit) {
    return (first ^ unit * kUnitBytes) + (lower ? 8 * Triangle::kRowBytes : 0);
  }
  static __device__ __forceinline__ void put(uint32_t first, bool lower, int unit, uint4 words) {
    ptx::shared_store(address(first, lower, unit), words);
  }
};

// Packs a block's accumulators times -diag(beta) as operand A, and its low part. `minus_beta`: of
// the lane's columns.
__device__ __forceinline__ void pack_left(uint32_t (&a)[4], const float (&x)[2][4],
                                          const float2 (&minus_beta)[2], uint32_t* low = nullptr) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float const first = minus_beta[n].x * x[n][2 * half];
      float const second = minus_beta[n].y * x[n][2 * half + 1];
      a[2 * n + half] = dtype::fp16::pack(first, second);
      if (low != nullptr) low[2 * n + half] = pack_low_fp16(first, second);
    }
  }
}

__device__ __forceinline__ void multiply_block(float (&x)[2][4], const uint32_t (&left)[4],
                                               const uint32_t (&right)[4]) {
  ptx::mma_m16n8k16<dtype::fp16>(x[0], left, right[0], right[1]);
  ptx::mma_m16n8k16<dtype::fp16>(x[1], left, right[2], right[3]);
}

// Computes the blocks of X below the diagonal, one column of blocks after the other, last column
// first, and passes their accumulators to finish(i, j, x, column). `column` is load_column(j),
// whose member `minus_betas` is of the lane's columns. Precondition: `matrix` holds the operands.
//   X_ij = Y - Y diag(beta) X_jj,
//   Y = (I - X_ii diag(beta)) N_ij - sum over k in (j, i) of X_ik diag(beta) N_kj
template <class LoadColumn, class Finish>
__device__ __forceinline__ void solve_below(const KeyProducts& products,
                                            const SolutionMatrix& matrix, int lane_id,
                                            LoadColumn&& load_column, Finish&& finish) {
  uint32_t left[kBlocks][kBlocks][4], left_low[kBlocks][4];
#pragma unroll
  for (int j = kBlocks - 2; j >= 0; --j) {
    auto const column = load_column(j);
    uint32_t right[kBlocks][4];
    ptx::ldmatrix_x4_trans(right[j], matrix.fragment(SolutionMatrix::right(j), lane_id));
    // The left operand's blocks of row j + 1, which are used from this column on.
    ptx::ldmatrix_x4(left[j + 1][j + 1], matrix.fragment(SolutionMatrix::left(j + 1), lane_id));
    ptx::ldmatrix_x4(left_low[j + 1], matrix.fragment(SolutionMatrix::left_low(j + 1), lane_id));
    __syncwarp();  // all lanes have read X_jj, which block (3, j) of the result overwrites
#pragma unroll
    for (int i = j + 1; i < kBlocks; ++i) {
      products.load(right[i], i, j, lane_id);
      float x[2][4] = {};
      multiply_block(x, left_low[i], right[i]);
#pragma unroll
      for (int k = i; k > j; --k) multiply_block(x, left[i][k], right[k]);
      uint32_t low[4];
      pack_left(left[i][j], x, column.minus_betas, low);
      multiply_block(x, low, right[j]);
      multiply_block(x, left[i][j], right[j]);
      finish(i, j, x, column);
      if (j > 0) pack_left(left[i][j], x, column.minus_betas);
    }
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
