// SolutionWriter: computes a record's first matrix, of one head of v, by one warp.
#pragma once
#include <cstdint>

#include "core/quad.cuh"
#include "core/warp_copy.cuh"
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
  float2 betas[2], factors[2];

  __device__ __forceinline__ BlockColumn(const HeadRows& head, int first) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      betas[n] = pair_of(head.beta, first + 8 * n);
      factors[n] = pair_of(head.columns, first + 8 * n);
    }
  }
};

// Computes the first matrix of a head's record in the warp's shared memory. kLow: its low part
// instead.
template <class Record, bool kLow>
class SolutionWriter {
  using Of = Solution<Record>;
  const KeyProducts& products;
  const HeadRows& head;
  float* const row_totals;  // sums of absolute values, within the blocks on the diagonal
  unsigned char* const matrix;
  int const lane;
  Lane const at;
  bool const wide;
  uint32_t growth = 0;  // bits of a float: integer order is that of positive floats, NaN last
  float largest = 0.f;

 public:
  __device__ __forceinline__ SolutionWriter(const KeyProducts& products, const HeadRows& head,
                                            float* row_totals, unsigned char* matrix)
      : products(products),
        head(head),
        row_totals(row_totals),
        matrix(matrix),
        lane(static_cast<int>(ptx::thread_index() % 32)),
        at(lane),
        wide(is_wide(head)) {}

  // Writes the matrix, and returns its growth.
  __device__ __forceinline__ float write(uint16_t* to) {
    DiagonalRows const x(products, head.beta, lane);
    put_row(x.upper, 0);
    put_row(x.lower, 8);
    __syncwarp();  // all lanes have written operands and totals of the diagonal blocks
    float totals[kBlocks][2] = {};
    float factors[kBlocks][2];
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors[i][half] = head.rows[kBlock * i + 8 * half + at.g];
      }
    }
    solve_below(
        products, operands(), lane, [&](int j) { return BlockColumn(head, kBlock * j + 2 * at.t); },
        [&](int i, int j, const float (&block)[2][4], const BlockColumn& column) {
          put_block(i, j, block, column, factors[i], totals[i]);
        });
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        add_total(quad_sum(totals[i][half]) + row_totals[kBlock * i + 8 * half + at.g]);
      }
    }
    __syncwarp();  // all lanes have read the operands
    operands().clear_operands(lane);
    start_warp_copy<Triangle::kBytes>(to, matrix);
    if (largest > Of::kLargest) growth = __float_as_uint(infinity());
    growth = __reduce_max_sync(0xffffffffu, growth);
    finish_warp_copies();  // the matrix's memory may be reused
    return growth > __float_as_uint(infinity()) ? infinity() : __uint_as_float(growth);
  }

 private:
  __device__ __forceinline__ uint32_t pack(float first, float second) {
    return kLow ? pack_rest(first, second) : dtype::fp16::pack(first, second);
  }
  __device__ __forceinline__ SolutionMatrix operands() const { return {ptx::smem_address(matrix)}; }
  __device__ __forceinline__ void add_total(float total) {
    growth = max(growth, __float_as_uint(total));
  }
  __device__ __forceinline__ float add(float element, float beta) {
    if constexpr (Of::kLargest < __builtin_huge_valf()) largest = fmaxf(largest, fabsf(element));
    return Of::size(element, beta);
  }

  // Stores a row of a diagonal block of X. Its columns from kCount on are 0.
  template <int kCount>
  __device__ __forceinline__ void put_row(const float (&x)[kCount], int below) {
    int const row = below + lane % 8, block = lane / 8, i = kBlock * block + row;
    float const beta = head.beta[i], factor = head.rows[i], sum = head.sums[i];
    float total = Of::diagonal_size(beta);
#pragma unroll
    for (int first = 0; first < kBlock; first += 8) {
      float eight[8] = {}, elements[8] = {}, of[8] = {};
      if (first < kCount) {
        int const column = kBlock * block + first;
        load_floats(elements, head.columns + column);
#pragma unroll
        for (int e = 0; e < 8; ++e) elements[e] *= factor;
        if (__builtin_expect(wide, false)) {
          load_floats(of, head.sums + column);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            elements[e] *= first + e < row ? exp2_approx(sum - of[e]) : 0.f;
          }
        }
        load_floats(of, head.beta + column);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          eight[e] = x[(first + e) % kCount];
          elements[e] *= eight[e];
          total += add(elements[e], of[e]);
        }
      }
      operands().put_operands(block, row, first, eight, of);
      *reinterpret_cast<uint4*>(matrix + SolutionMatrix::chunk_offset(i, 2 * block + first / 8)) = {
          pack(elements[0], elements[1]), pack(elements[2], elements[3]),
          pack(elements[4], elements[5]), pack(elements[6], elements[7])};
    }
    add_total(total);
    row_totals[i] = total;
    unsigned char* const diagonal = matrix + SolutionMatrix::chunk_offset(i, i / 8) + i % 8 * 2;
    ptx::shared_store(ptx::smem_address(diagonal),
                      static_cast<uint16_t>(dtype::fp16::pack(Of::diagonal(beta), 0.f)));
  }

  // Stores the lane's elements of a block of X below the diagonal.
  __device__ __forceinline__ void put_block(int i, int j, const float (&x)[2][4],
                                            const BlockColumn& column, const float (&factors)[2],
                                            float (&totals)[2]) {
    float elements[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      int const n = e / 4, half = e / 2 % 2;
      float2 const of = column.factors[n];
      elements[n][e % 4] = factors[half] * (e % 2 == 0 ? of.x : of.y);
    }
    if (__builtin_expect(wide, false)) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        int const n = e / 4, half = e / 2 % 2;
        float const of_row = head.sums[kBlock * i + 8 * half + at.g];
        float const of_column = head.sums[kBlock * j + 8 * n + 2 * at.t + e % 2];
        elements[n][e % 4] *= exp2_approx(of_row - of_column);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const first = elements[n][2 * half] * x[n][2 * half];
        float const second = elements[n][2 * half + 1] * x[n][2 * half + 1];
        totals[half] += add(first, column.betas[n].x) + add(second, column.betas[n].y);
        uint32_t const offset =
            SolutionMatrix::chunk_offset(kBlock * i + 8 * half + at.g, 2 * j + n) + 4 * at.t;
        *reinterpret_cast<uint32_t*>(matrix + offset) = pack(first, second);
      }
    }
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
