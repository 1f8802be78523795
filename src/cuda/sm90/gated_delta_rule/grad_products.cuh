// What a warpgroup of rows_kernel (grad_rows.cuh) computes: products of tiles in shared memory, and
// what becomes of their elements. The first of the two warpgroups has the square F and the gradient
// of Q K^T, the second E and that of K K^T; of dQ and dK each has half of the columns.
#pragma once
#include <cstdint>

#include "core/smem_layout.cuh"
#include "gated_delta_rule/grad_chain.cuh"
#include "gated_delta_rule/grad_rows.cuh"
#include "ptx/ldmatrix.cuh"
#include "sm90/gated_delta_rule/chain.cuh"
#include "sm90/gemm.cuh"

namespace flashvar::sm90::gated_delta_rule {

// Operands of 64 rows: squares, tiles of rows and of columns of V, images.
using RowsAsK = MnMajor<kSquareBytes>;    // rows are k
using ColumnsAsK = KMajor<kSquareBytes>;  // columns are k

// Sums by warps, each of 16 tokens.
struct RowSums {
  float gates[2][kChunk];    // of G but for `kept`: products of A, P, c and a with their gradients
  float kept[2][kChunk];     // k (R dS^T)
  float columns[8][kChunk];  // products of A and P with their gradients, without beta of the column
  float states[2];           // S dS, of each other head
  float unused[2];
};

// d = A B or, with kAdd, d += A B over kSteps k-steps of 16; of the open group of instructions.
template <class Dtype, int kN, bool kAdd, int kSteps = 4, class A, class B>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], const A& a, const B& b) {
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
    ptx::Wgmma<Dtype, kN>::template ss<B::kTransposed, A::kTransposed>(d, a.step(kk), b.step(kk),
                                                                       kAdd || kk > 0);
  }
}

// Where a warpgroup's half of the columns of a tile of K columns begins.
template <class Config>
__device__ __forceinline__ uint32_t half_of(uint32_t tile, uint32_t warpgroup) {
  constexpr int kBytes = 2 * Config::kColumns;
  return tile + (kBytes == 128 ? warpgroup * Config::kColBlockBytes : warpgroup * kBytes);
}

// The products with what slots hold.
template <class Config>
struct SlotProducts {
  static constexpr int kElements = Config::kColumns / 2;
  float square[32];                                          // dOut R^T or dV R^T
  float of_q[kElements], of_k[kElements], later[kElements];  // dOut S^T, dV S^T, R dS^T
  float spare[kElements == 32 ? 1 : 32];

  // Accumulators for another product, once of_q has been read. The compiler would not give its
  // registers to others, and there are too few.
  __device__ __forceinline__ float (&after_of_q())[32] {
    if constexpr (kElements == 32) {
      return of_q;
    } else {
      return spare;
    }
  }

  __device__ __forceinline__ void fence() {
    ptx::wgmma_fence_operand(square);
    ptx::wgmma_fence_operand(of_q);
    ptx::wgmma_fence_operand(of_k);
    ptx::wgmma_fence_operand(later);
  }

  // Starts those of a slot, which with kAdd are added.
  template <bool kAdd>
  __device__ __forceinline__ void start(uint32_t slot, uint32_t warpgroup) {
    using Dtype = typename Config::Dtype;
    constexpr int kN = Config::kColumns;
    uint32_t const values = slot + Config::kGradValues, residuals = slot + Config::kResiduals;
    uint32_t const of_square = slot + Config::kGradOut + warpgroup * kSquareBytes;
    RowsAsK const state(half_of<Config>(slot + Config::kState, warpgroup));
    RowsAsK const grad_state(half_of<Config>(slot + Config::kGradState, warpgroup));
    if constexpr (kAdd) fence();  // else the registers are others' until here
    ptx::wgmma_fence();
    multiply<Dtype, kN, kAdd>(of_q, ColumnsAsK(slot + Config::kGradOut), state);
    multiply<Dtype, kN, kAdd>(of_k, ColumnsAsK(values), state);
    multiply<Dtype, kN, kAdd>(later, RowsAsK(residuals), grad_state);
    multiply<Dtype, kChunk, kAdd>(square, ColumnsAsK(of_square), RowsAsK(residuals));
    ptx::wgmma_commit();
  }
};

// The lane's address of the warp's 16 rows of its half of a tile, for ldmatrix.
template <class Config>
__device__ __forceinline__ uint32_t half_fragments(uint32_t tile, uint32_t warpgroup) {
  using Tile = typename Config::Tile;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t const first = tile + Tile::chunk_offset(16 * Lane().warp + lane % 16, lane / 16);
  return Tile::advance(first, static_cast<int>(warpgroup) * (Config::kColumns / 8));
}

// Calls f(i, x) for the elements of a tile that lie like the accumulators of the warp's half.
template <class Config, class F>
__device__ __forceinline__ void each_of_half(uint32_t tile, uint32_t warpgroup, F f) {
  using Dtype = typename Config::Dtype;
  uint32_t const fragments = half_fragments<Config>(tile, warpgroup);
#pragma unroll
  for (int n = 0; n < Config::kColumns / 8; n += 2) {
    uint32_t words[4];
    ptx::ldmatrix_x4(words, Config::Tile::advance(fragments, n));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const first = 4 * (n + i / 2) + 2 * (i % 2);
      f(first, Dtype::unpack(static_cast<uint16_t>(words[i])));
      f(first + 1, Dtype::unpack(static_cast<uint16_t>(words[i] >> 16)));
    }
  }
}

// The products of the warp's rows of its half of a tile with accumulators, summed over the quad;
// of rows g and g + 8.
template <class Config>
__device__ __forceinline__ float2 row_products(const float (&d)[Config::kColumns / 2],
                                               uint32_t tile, uint32_t warpgroup) {
  float sums[2] = {};
  each_of_half<Config>(tile, warpgroup,
                       [&](int i, float x) { sums[i / 2 % 2] = fmaf(x, d[i], sums[i / 2 % 2]); });
  return {quad_sum(sums[0]), quad_sum(sums[1])};
}

// d += factors o e, by rows.
template <int kElements>
__device__ __forceinline__ void add_scaled(float (&d)[kElements], const float (&e)[kElements],
                                           const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) d[i] = fmaf(factors[i / 2 % 2], e[i], d[i]);
}

// Of one square: `d`, E or F, becomes the gradient of the product x K^T as it was multiplied. The
// products with it, without beta of the column, are the lane's parts of the sums of columns, of
// tile n of 8 the elements 2 n and 2 n + 1; with beta they are added to those of its rows.
__device__ __forceinline__ void finish_square(float (&d)[32], const float (&product)[32],
                                              uint32_t warpgroup, float scale,
                                              const RecordRows& rows, float (&row_sums)[2],
                                              float (&columns)[16]) {
  Lane const at;
  float factors[2], sums[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = 16 * at.warp + at.g + 8 * half;
    factors[half] = warpgroup == 0 ? scale * rows.norm_q[i] : -rows.norm_k[i];
    sums[half] = rows.sums[i];
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    columns[2 * n] = columns[2 * n + 1] = 0.f;
    if (n / 2 > at.warp) {  // above the diagonal for all of the warp's rows
#pragma unroll
      for (int e = 0; e < 4; ++e) d[4 * n + e] = 0.f;
      continue;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      int const j = 8 * n + 2 * at.t + k;
      float const sum = rows.sums[j], norm = rows.norm_k[j], beta = rows.beta[j];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // The diagonal belongs to Q K^T alone.
        bool const exists = j + static_cast<int>(warpgroup) <= 16 * at.warp + at.g + 8 * half;
        float const decay = exp2_approx(sums[half] - sum);
        float& value = d[4 * n + 2 * half + k];
        // Above the diagonal 0 is selected, not multiplied by: the factors may be inf there.
        value = exists ? value * (factors[half] * norm) * decay : 0.f;
        float const one = exists ? value * product[4 * n + 2 * half + k] : 0.f;
        columns[2 * n + k] += one;
        value *= beta;
        row_sums[half] = fmaf(one, beta, row_sums[half]);
      }
    }
  }
}

// Of 4 kCount sums of columns the lane keeps half, added to those of the lane 4 kCount away, which
// keeps the others.
template <int kCount>
__device__ __forceinline__ void halve_columns(float (&columns)[16]) {
  bool const upper = (threadIdx.x & (4 * kCount)) != 0;
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i) {
    float const sent = upper ? columns[i] : columns[i + 2 * kCount];
    float const mine = upper ? columns[i + 2 * kCount] : columns[i];
    columns[i] = mine + __shfl_xor_sync(0xffffffffu, sent, 4 * kCount);
  }
}

// Adds up the sums of columns of the warp's lanes; the lane's two are those of columns 8 g + 2 t
// and the next.
__device__ __forceinline__ float2 add_columns(float (&columns)[16]) {
  halve_columns<4>(columns);
  halve_columns<2>(columns);
  halve_columns<1>(columns);
  return {columns[0], columns[1]};
}

// Stores the warp's 16 rows of a square in 16 bits.
template <class Dtype>
__device__ __forceinline__ void put_square(uint32_t square, const float (&d)[32]) {
  uint32_t packed[4][4];
  pack<Dtype>(packed, d);
  store_operand<kSquareBytes>(square, packed, 0);
  ptx::fence_async_proxy();  // wgmma reads it
}

// Adds what the gradients of Q K^T and K K^T, two squares, give to dQ and dK.
template <class Config>
__device__ __forceinline__ void add_square_products(float (&dq)[Config::kColumns / 2],
                                                    float (&dk)[Config::kColumns / 2],
                                                    uint32_t tiles, uint32_t squares,
                                                    uint32_t warpgroup) {
  using Dtype = typename Config::Dtype;
  constexpr int kN = Config::kColumns;
  RowsAsK const q(half_of<Config>(tiles, warpgroup));
  RowsAsK const k(half_of<Config>(tiles + Config::kK, warpgroup));
  uint32_t const of_kk = squares + kSquareBytes;
  ptx::wgmma_fence_operand(dq);
  ptx::wgmma_fence_operand(dk);
  ptx::wgmma_fence();
  multiply<Dtype, kN, true>(dq, ColumnsAsK(squares), k);
  multiply<Dtype, kN, true>(dk, RowsAsK(squares), q);
  multiply<Dtype, kN, true>(dk, ColumnsAsK(of_kk), k);
  multiply<Dtype, kN, true>(dk, RowsAsK(of_kk), k);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(dq);
  ptx::wgmma_fence_operand(dk);
}

// Takes out of the gradients of rows what would change their length: d -= (x d) x / |x|^2. `along`:
// x d of the two halves.
template <class Config>
__device__ __forceinline__ void project(float (&d)[Config::kColumns / 2], uint32_t tile,
                                        uint32_t warpgroup, const float* norm,
                                        const float (&along)[2][kChunk]) {
  Lane const at;
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = 16 * at.warp + at.g + 8 * half;
    factors[half] = -(along[0][i] + along[1][i]) * norm[i] * norm[i];
  }
  each_of_half<Config>(tile, warpgroup,
                       [&](int i, float x) { d[i] = fmaf(factors[i / 2 % 2], x, d[i]); });
}

}  // namespace flashvar::sm90::gated_delta_rule
