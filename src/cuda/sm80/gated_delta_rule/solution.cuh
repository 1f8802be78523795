// SolutionWriter: computes a record's first matrix, of one head of v, by one warp.
#pragma once
#include <cstdint>

#include "core/quad.cuh"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/triangle.cuh"
#include "ptx/smem_address.cuh"
#include "ptx/vectors.cuh"
#include "sm80/gated_delta_rule/chunk_vectors.cuh"
#include "sm80/gated_delta_rule/inverse.cuh"

namespace flashvar::sm80::gated_delta_rule {

// Vectors of the lane's columns in a column of blocks: `first` and the next, and the same eight
// columns further on.
struct BlockColumn {
  float2 minus_betas[2], factors[2];

  __device__ __forceinline__ BlockColumn(const HeadVectors& head, int first) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      minus_betas[n] = pair_of(head.minus_beta, first + 8 * n);
      factors[n] = pair_of(head.columns, first + 8 * n);
    }
  }
};

// Computes the first matrix of a head's record in the warp's shared memory. kRare: supports far
// gates, and `low`, which asks for the low part instead.
template <class Record, bool kRare>
class SolutionWriter {
  using FirstMatrix = Solution<Record>;
  const KeyProducts& products;
  const HeadVectors& head;
  float* const row_totals;  // contributions to the growth, within the blocks on the diagonal
  SolutionMatrix const matrix;
  unsigned char* const bytes;  // of the matrix
  int const lane_id;
  Lane const lane;
  uint32_t const word;  // offset of the lane's elements in a tile of the matrix
  bool const far_gates, low;
  bool too_large = false;  // whether an element is larger than FirstMatrix::kLargest

 public:
  __device__ __forceinline__ SolutionWriter(const KeyProducts& products, const HeadVectors& head,
                                            float* row_totals, unsigned char* matrix,
                                            bool low = false)
      : products(products),
        head(head),
        row_totals(row_totals),
        matrix{ptx::smem_address(matrix)},
        bytes(matrix),
        lane_id(static_cast<int>(ptx::thread_index() % 32)),
        lane(lane_id),
        word(Triangle::unit_offset(lane.g, 0) + 4 * lane.t),
        far_gates(kRare && head.far_gates != 0),
        low(kRare && low) {}

  // Writes the matrix, and returns its growth.
  __device__ __forceinline__ float write() {
    put_diagonal(DiagonalRows(products, head.minus_beta, lane_id));
    __syncwarp();  // all lanes have written operands and totals of the diagonal blocks
    float totals[kBlocks][2] = {};
    float factors[kBlocks][2];
    auto load_column = [&](int j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of row j + 1 of blocks, used from this column on
        factors[j + 1][half] = head.rows[kBlock * (j + 1) + 8 * half + lane.g];
      }
      return BlockColumn(head, kBlock * j + 2 * lane.t);
    };
    auto finish = [&](int i, int j, const float (&block)[2][4], const BlockColumn& column) {
      put_block(i, j, block, column, factors[i], totals[i]);
    };
    solve_below(products, matrix, lane_id, load_column, finish);
    uint32_t growth = 0;  // bits of a float >= 0: their order is that of integers, NaN last
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const total =
            row_totals[kBlock * i + 8 * half + lane.g] + (i > 0 ? quad_sum(totals[i][half]) : 0.f);
        growth = max(growth, __float_as_uint(total));
      }
    }
    __syncwarp();  // all lanes have read the operands
    matrix.clear_operands(lane_id);
    if (too_large) growth = __float_as_uint(infinity());
    growth = __reduce_max_sync(0xffffffffu, growth);
    return growth > __float_as_uint(infinity()) ? infinity() : __uint_as_float(growth);
  }

 private:
  __device__ __forceinline__ uint32_t pack(float first, float second) {
    return low ? pack_low_fp16(first, second) : dtype::fp16::pack(first, second);
  }
  __device__ __forceinline__ float add(float element, float minus_beta) {
    too_large |= fabsf(element) > FirstMatrix::kLargest;
    return FirstMatrix::size(element, minus_beta);
  }

  // Stores the lane's two rows of a diagonal block of X.
  __device__ __forceinline__ void put_diagonal(const DiagonalRows& x) {
    DiagonalAddresses const addresses(matrix, lane_id);
    int const block = kBlock * (lane_id / 8), row = lane_id % 8;
    float beta[2], factors[2], totals[2];
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      int const i = block + 8 * lower + row;
      beta[lower] = -head.minus_beta[i];
      factors[lower] = head.rows[i];
      totals[lower] = FirstMatrix::diagonal_size(beta[lower]);
    }
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      int const column = block + 8 * unit;
      float columns[8], minus_betas[8];
      load_floats(columns, head.columns + column);
      load_floats(minus_betas, head.minus_beta + column);
#pragma unroll
      for (int lower = unit; lower < 2; ++lower) {
        float eight[8], elements[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          eight[e] = lower != 0 ? x.lower[8 * unit + e] : x.upper[e];
          elements[e] = factors[lower] * columns[e];
        }
        if (far_gates) {
          float const sum = head.sums[block + 8 * lower + row];
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            bool const below = lower > unit || e < row;
            elements[e] *= below ? exp2_approx(sum - head.sums[column + e]) : 0.f;
          }
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          elements[e] *= eight[e];
          totals[lower] += add(elements[e], minus_betas[e]);
        }
        addresses.put_operands(lower, unit, eight, minus_betas);
        addresses.put_result(lower, unit,
                             {pack(elements[0], elements[1]), pack(elements[2], elements[3]),
                              pack(elements[4], elements[5]), pack(elements[6], elements[7])});
      }
    }
    addresses.put_zeros(false, 1);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      row_totals[block + 8 * lower + row] = totals[lower];
      addresses.put_diagonal(
          lower, static_cast<uint16_t>(dtype::fp16::pack(FirstMatrix::diagonal(beta[lower]), 0.f)));
    }
  }

  // Stores the lane's elements of a block of X below the diagonal.
  __device__ __forceinline__ void put_block(int i, int j, const float (&x)[2][4],
                                            const BlockColumn& column, const float (&factors)[2],
                                            float (&totals)[2]) {
    float elements[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      int const n = e / 4, half = e / 2 % 2;
      float2 const pair = column.factors[n];
      elements[n][e % 4] = factors[half] * (e % 2 == 0 ? pair.x : pair.y);
    }
    if (far_gates) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        int const n = e / 4, half = e / 2 % 2;
        float const row_sum = head.sums[kBlock * i + 8 * half + lane.g];
        float const column_sum = head.sums[kBlock * j + 8 * n + 2 * lane.t + e % 2];
        elements[n][e % 4] *= exp2_approx(row_sum - column_sum);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const first = elements[n][2 * half] * x[n][2 * half];
        float const second = elements[n][2 * half + 1] * x[n][2 * half + 1];
        totals[half] += add(first, column.minus_betas[n].x) + add(second, column.minus_betas[n].y);
        uint32_t const offset = Triangle::advance(word, (2 * j + n) % 4) +
                                (2 * i + half) * 8 * Triangle::kRowBytes +
                                j / 2 * Triangle::kColBlockBytes;
        *reinterpret_cast<uint32_t*>(bytes + offset) = pack(first, second);
      }
    }
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
