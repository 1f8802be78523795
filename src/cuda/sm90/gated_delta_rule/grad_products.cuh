// Steps of a warpgroup of rows_kernel (grad_rows.cuh): GEMMs of tiles in shared memory, and the
// element-wise work on their results. The first of the two warpgroups computes the square F and
// dQK, the gradient of Q K^T; the second computes E and dKK, that of K K^T. Each has half of the
// columns of dQ and dK.
#pragma once
#include <cstdint>

#include "core/smem_layout.cuh"
#include "gated_delta_rule/grad_chain_parts.cuh"
#include "gated_delta_rule/grad_rows.cuh"
#include "ptx/ldmatrix.cuh"
#include "sm90/gated_delta_rule/chain_parts.cuh"

namespace flashvar::sm90::gated_delta_rule {

// Partial sums of the warps, each of 16 tokens.
struct GateSumsByWarp {
  float gates[2][kChunk];    // sums over rows of A, P, c and a, each times its gradient
  float later[2][kChunk];    // rows of K times rows of R dS^T
  float columns[8][kChunk];  // sums over columns of A and P times gradients, without beta
  float states[2];           // second half of S times dS, alternating between two heads
  float unused[2];
};

// d = A B or, with kAdd, d += A B over kSteps k-steps of 16. Adds wgmma instructions to the open
// group; the caller fences and commits.
template <class Dtype, int kN, bool kAdd, int kSteps = 4, class A, class B>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], const A& a, const B& b) {
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
    ptx::Wgmma<Dtype, kN>::template ss<B::kTransposed, A::kTransposed>(d, a.step(kk), b.step(kk),
                                                                       kAdd || kk > 0);
  }
}

// Address of the warpgroup's half of a tile's columns.
template <class Config>
__device__ __forceinline__ uint32_t half_of(uint32_t tile, uint32_t warpgroup) {
  constexpr int kBytes = 2 * Config::kColumns;
  return tile + (kBytes == 128 ? warpgroup * Config::kColBlockBytes : warpgroup * kBytes);
}

// Accumulators of the products with a slot's tiles.
template <class Config>
struct SlotProducts {
  static constexpr int kElements = Config::kColumns / 2;
  float square[32];                                    // dOut R^T or dV R^T
  float q[kElements], k[kElements], later[kElements];  // dOut S^T, dV S^T, R dS^T
  float spare[kElements == 32 ? 1 : 32];

  // Accumulators for another product, after q has been read. Where sizes agree it reuses q's
  // registers, which the compiler does not do by itself, and there are too few.
  __device__ __forceinline__ float (&after_q())[32] {
    if constexpr (kElements == 32) {
      return q;
    } else {
      return spare;
    }
  }

  __device__ __forceinline__ void fence() {
    ptx::wgmma_fence_operand(square);
    ptx::wgmma_fence_operand(q);
    ptx::wgmma_fence_operand(k);
    ptx::wgmma_fence_operand(later);
  }

  // Issues the products with a slot as one wgmma group; kAdd: adds to the accumulators.
  template <bool kAdd>
  __device__ __forceinline__ void start(uint32_t slot, uint32_t warpgroup) {
    using Dtype = typename Config::Dtype;
    constexpr int kN = Config::kColumns;
    uint32_t const values = slot + Config::kGradValues, residuals = slot + Config::kResiduals;
    uint32_t const square_a = slot + Config::kGradOut + warpgroup * kTile64Bytes;
    RowsAsK const state(half_of<Config>(slot + Config::kState, warpgroup));
    RowsAsK const grad_state(half_of<Config>(slot + Config::kGradState, warpgroup));
    if constexpr (kAdd) fence();  // without kAdd it would make the registers live too early
    ptx::wgmma_fence();
    multiply<Dtype, kN, kAdd>(q, ColumnsAsK(slot + Config::kGradOut), state);
    multiply<Dtype, kN, kAdd>(k, ColumnsAsK(values), state);
    multiply<Dtype, kN, kAdd>(later, RowsAsK(residuals), grad_state);
    multiply<Dtype, kChunk, kAdd>(square, ColumnsAsK(square_a), RowsAsK(residuals));
    ptx::wgmma_commit();
  }
};

// The lane's ldmatrix address of the warp's 16 rows of its half of a tile.
template <class Config>
__device__ __forceinline__ uint32_t half_fragments(uint32_t tile, uint32_t warpgroup) {
  using Tile = typename Config::Tile;
  int const lane_id = static_cast<int>(threadIdx.x) % 32;
  uint32_t const first = tile + Tile::unit_offset(16 * Lane().warp + lane_id % 16, lane_id / 16);
  return Tile::advance(first, static_cast<int>(warpgroup) * (Config::kColumns / 8));
}

// Calls f(i, x) for the tile's element x at the position of accumulator element i, for the warp's
// half.
template <class Config, class F>
__device__ __forceinline__ void for_each_half_element(uint32_t tile, uint32_t warpgroup, F f) {
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

// Dot products of accumulator rows g and g + 8 with the warp's rows of its half of a tile, summed
// over the quad.
template <class Config>
__device__ __forceinline__ float2 row_products(const float (&d)[Config::kColumns / 2],
                                               uint32_t tile, uint32_t warpgroup) {
  float sums[2] = {};
  for_each_half_element<Config>(
      tile, warpgroup, [&](int i, float x) { sums[i / 2 % 2] = fmaf(x, d[i], sums[i / 2 % 2]); });
  return {quad_sum(sums[0]), quad_sum(sums[1])};
}

// d += factors o e, one factor per row.
template <int kElements>
__device__ __forceinline__ void add_scaled(float (&d)[kElements], const float (&e)[kElements],
                                           const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) d[i] = fmaf(factors[i / 2 % 2], e[i], d[i]);
}

// Turns a square `d`, F or in the second warpgroup E, into the gradient of `product`, Q K^T or K
// K^T. The element-wise products of both are summed: `columns` (without beta of the column) are the
// lane's sums over its rows, [2 n + e] for column 8 n + 2 t + e; to `row_sums` they are added with
// beta.
__device__ __forceinline__ void finish_square(float (&d)[32], const float (&product)[32],
                                              uint32_t warpgroup, float scale,
                                              const RecordVectors& vectors, float (&row_sums)[2],
                                              float (&columns)[16]) {
  Lane const lane;
  float factors[2], sums[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = 16 * lane.warp + lane.g + 8 * half;
    factors[half] = warpgroup == 0 ? scale * vectors.norm_q[i] : -vectors.norm_k[i];
    sums[half] = vectors.sums[i];
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    columns[2 * n] = columns[2 * n + 1] = 0.f;
    if (n / 2 > lane.warp) {  // the tile is above the diagonal
#pragma unroll
      for (int e = 0; e < 4; ++e) d[4 * n + e] = 0.f;
      continue;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const j = 8 * n + 2 * lane.t + e;
      float const sum = vectors.sums[j], norm = vectors.norm_k[j], beta = vectors.beta[j];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Q K^T has the diagonal, K K^T does not.
        bool const exists = j + static_cast<int>(warpgroup) <= 16 * lane.warp + lane.g + 8 * half;
        float const decay = exp2_approx(sums[half] - sum);
        float& value = d[4 * n + 2 * half + e];
        // Above the diagonal 0 is selected, not multiplied by: the factors may be inf there.
        value = exists ? value * (factors[half] * norm) * decay : 0.f;
        float const one = exists ? value * product[4 * n + 2 * half + e] : 0.f;
        columns[2 * n + e] += one;
        value *= beta;
        row_sums[half] = fmaf(one, beta, row_sums[half]);
      }
    }
  }
}

// One step of a reduction among lanes: of 4 kCount column sums the lane keeps one half and adds to
// it that of the lane 4 kCount away, which keeps the other half.
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

// Reduces the lanes' column sums over the warp; returns those of columns 8 g + 2 t and 8 g + 2 t
// + 1.
__device__ __forceinline__ float2 add_columns(float (&columns)[16]) {
  halve_columns<4>(columns);
  halve_columns<2>(columns);
  halve_columns<1>(columns);
  return {columns[0], columns[1]};
}

// Stores the warp's 16 rows of a square, rounded to 16 bits.
template <class Dtype>
__device__ __forceinline__ void put_square(uint32_t square, const float (&d)[32]) {
  uint32_t packed[4][4];
  pack<Dtype>(packed, d);
  store_operand<kTile64Bytes>(square, packed, 0);
  ptx::fence_async_proxy();  // wgmma reads it
}

// Adds the products of the squares dQK and dKK to dQ and dK.
template <class Config>
__device__ __forceinline__ void add_square_products(float (&dq)[Config::kColumns / 2],
                                                    float (&dk)[Config::kColumns / 2],
                                                    uint32_t tiles, uint32_t squares,
                                                    uint32_t warpgroup) {
  using Dtype = typename Config::Dtype;
  constexpr int kN = Config::kColumns;
  RowsAsK const q(half_of<Config>(tiles, warpgroup));
  RowsAsK const k(half_of<Config>(tiles + Config::kK, warpgroup));
  uint32_t const dkk = squares + kTile64Bytes;  // dQK lies before it
  ptx::wgmma_fence_operand(dq);
  ptx::wgmma_fence_operand(dk);
  ptx::wgmma_fence();
  multiply<Dtype, kN, true>(dq, ColumnsAsK(squares), k);
  multiply<Dtype, kN, true>(dk, RowsAsK(squares), q);
  multiply<Dtype, kN, true>(dk, ColumnsAsK(dkk), k);
  multiply<Dtype, kN, true>(dk, RowsAsK(dkk), k);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(dq);
  ptx::wgmma_fence_operand(dk);
}

// Gradient of the normalization of rows: removes the component along the row, d -= (x d) x / |x|^2.
// `along`: x d, summed over each half of the columns.
template <class Config>
__device__ __forceinline__ void project(float (&d)[Config::kColumns / 2], uint32_t tile,
                                        uint32_t warpgroup, const float* norm,
                                        const float (&along)[2][kChunk]) {
  Lane const lane;
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = 16 * lane.warp + lane.g + 8 * half;
    factors[half] = -(along[0][i] + along[1][i]) * norm[i] * norm[i];
  }
  for_each_half_element<Config>(tile, warpgroup,
                                [&](int i, float x) { d[i] = fmaf(factors[i / 2 % 2], x, d[i]); });
}

}  // namespace flashvar::sm90::gated_delta_rule
