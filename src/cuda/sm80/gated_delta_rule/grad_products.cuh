// Steps of a warp of rows_kernel (grad_rows.cuh): GEMMs of tiles in shared memory, and the
// element-wise work on their results.
#pragma once
#include <cstdint>

#include "core/quad.cuh"
#include "core/vec.cuh"
#include "ptx/vectors.cuh"
#include "sm80/gated_delta_rule/grad_chain_parts.cuh"
#include "sm80/gated_delta_rule/grad_gates.cuh"

namespace flashvar::sm80::gated_delta_rule {

// The lane's ldmatrix.trans offset of a 16 x 16 fragment of operand A that is the transpose of a
// tile's: row 0 of the tile is column 0 of the fragment.
__device__ __forceinline__ uint32_t transposed_offset(int unit) {
  int const lane_id = static_cast<int>(threadIdx.x) % 32;
  int const row = lane_id / 16 * 8 + lane_id % 8;
  return Tile64::unit_offset(row, unit + lane_id / 8 % 2);
}

// The warp's part of a 64-row result: 16 tokens (`strip`), and a quarter of the columns. Squares,
// the 64 x 64 matrices of a chunk, are lower triangular: a warp whose quarter lies right of its
// strip has no elements. Strips are permuted by quarter so that each of an SM's four schedulers
// gets two or three warps that have some.
struct WarpTile {
  int strip, quarter;

  __device__ __forceinline__ WarpTile() {
    int const warp = static_cast<int>(threadIdx.x) / 32;
    quarter = warp / 4;
    strip = warp % 4 ^ (quarter == 2 ? 2 : quarter == 3 ? 1 : 0);
  }
  __device__ __forceinline__ bool has_elements() const { return quarter <= strip; }
};

// The lane's ldmatrix address of the fragment at row 0 and the warp's first column of a tile.
template <class Config>
__device__ __forceinline__ uint32_t column_fragments(uint32_t tile) {
  using Layout = typename Config::Tile;
  return Layout::advance(tile + fragment_offset<Layout>(),
                         WarpTile().quarter * (Config::kColumns / 8));
}

// c += a B for the warp's columns. Rows of B's tile are k, from row `row` on.
template <class Config, class Acc>
__device__ __forceinline__ void add_product(Acc& c, const uint32_t (&a)[4], uint32_t fragments,
                                            int row) {
  using Layout = typename Config::Tile;
#pragma unroll
  for (int n = 0; n < Acc::kMmaCols; n += 2) {
    uint32_t b[4];
    ptx::ldmatrix_x4_trans(b, Layout::advance(fragments, n) + row * Layout::kRowBytes);
    ptx::mma_m16n8k16<typename Config::Dtype>(c.tile[0][n], a, b[0], b[1]);
    ptx::mma_m16n8k16<typename Config::Dtype>(c.tile[0][n + 1], a, b[2], b[3]);
  }
}

// c += a B and d += e B; loads each fragment of B once.
template <class Config, class Acc>
__device__ __forceinline__ void add_products(Acc& c, const uint32_t (&a)[4], Acc& d,
                                             const uint32_t (&e)[4], uint32_t fragments, int row) {
  using Dtype = typename Config::Dtype;
  using Layout = typename Config::Tile;
#pragma unroll
  for (int n = 0; n < Acc::kMmaCols; n += 2) {
    uint32_t b[4];
    ptx::ldmatrix_x4_trans(b, Layout::advance(fragments, n) + row * Layout::kRowBytes);
    ptx::mma_m16n8k16<Dtype>(c.tile[0][n], a, b[0], b[1]);
    ptx::mma_m16n8k16<Dtype>(d.tile[0][n], e, b[0], b[1]);
    ptx::mma_m16n8k16<Dtype>(c.tile[0][n + 1], a, b[2], b[3]);
    ptx::mma_m16n8k16<Dtype>(d.tile[0][n + 1], e, b[2], b[3]);
  }
}

// The lane's partial dot products of accumulator rows with the warp's rows of a tile.
template <class Config, class Acc>
__device__ __forceinline__ float2 row_products(const Acc& c, uint32_t tile) {
  using Dtype = typename Config::Dtype;
  using Layout = typename Config::Tile;
  uint32_t const mine = column_fragments<Config>(tile) + WarpTile().strip * 16 * Layout::kRowBytes;
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < Acc::kMmaCols; n += 2) {
    uint32_t words[4];
    ptx::ldmatrix_x4(words, Layout::advance(mine, n));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&pair)[4] = c.tile[0][n + i / 2];
      float& to = i % 2 == 0 ? sum.x : sum.y;
      to = fmaf(Dtype::unpack(static_cast<uint16_t>(words[i])), pair[i % 2 * 2], to);
      to = fmaf(Dtype::unpack(static_cast<uint16_t>(words[i] >> 16)), pair[i % 2 * 2 + 1], to);
    }
  }
  return sum;
}

// Writes the sums over the warp's columns of its rows, given the lanes' partial sums.
__device__ __forceinline__ void write_row_sums(float (&sums)[kChunk], float2 parts) {
  Lane const lane;
  int const row = 16 * WarpTile().strip + lane.g;
  parts = {quad_sum(parts.x), quad_sum(parts.y)};
  if (lane.t == 0) {
    sums[row] = parts.x;
    sums[row + 8] = parts.y;
  }
}

using Squares = Accumulator<16, kChunk / 4>;

// e += dV R^T and, with `both`, f += dOut R^T, for a slot.
template <class Dtype, class Config>
__device__ __forceinline__ void add_squares(Squares& e, Squares& f, uint32_t slot, bool both) {
  WarpTile const warp_tile;
  if (!warp_tile.has_elements()) return;
  uint32_t const rows = slot + warp_tile.strip * 16 * Tile64::kRowBytes + fragment_offset<Tile64>();
  uint32_t const residuals =
      Tile64::advance(slot + Config::kResiduals + fragment_offset<Tile64>(), 2 * warp_tile.quarter);
#pragma unroll Config::kUnroll
  for (int kk = 0; kk < 4; ++kk) {
    uint32_t a[4], b[4];
    ptx::ldmatrix_x4_trans(b, residuals + 16 * kk * Tile64::kRowBytes);
    ptx::ldmatrix_x4(a, Tile64::advance(rows + Config::kGradValues, 2 * kk));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::mma_m16n8k16<Dtype>(e.tile[0][n], a, b[2 * n], b[2 * n + 1]);
    }
    if (!both) continue;
    ptx::ldmatrix_x4(a, Tile64::advance(rows + Config::kGradOut, 2 * kk));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::mma_m16n8k16<Dtype>(f.tile[0][n], a, b[2 * n], b[2 * n + 1]);
    }
  }
}

// The warp's part of Q K^T or K K^T.
template <class Config>
__device__ __forceinline__ void multiply_keys(Squares& c, uint32_t x, uint32_t k) {
  using Layout = typename Config::Tile;
  WarpTile const warp_tile;
  c.clear();
  if (!warp_tile.has_elements()) return;
  gemm_nt<typename Config::Dtype, Layout, Layout, Config::kDim>(
      c, x + warp_tile.strip * 16 * Layout::kRowBytes,
      k + warp_tile.quarter * 16 * Layout::kRowBytes);
}

// `d` and `product` are the squares F and Q K^T, or with kKeys E and K K^T. Replaces `d` by the
// gradient of `product`, times beta of the column. Adds that gradient times `product`, element by
// element, to the lane's sums: without beta to `columns`, over rows; with it to `row_sum`, over
// columns.
template <bool kKeys>
__device__ __forceinline__ void finish_square(Squares& d, const Squares& product, float scale,
                                              const RecordVectors& vectors, float2& row_sum,
                                              float (&columns)[4]) {
  Lane const lane;
  WarpTile const warp_tile;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    int const j = 16 * warp_tile.quarter + 8 * n + 2 * lane.t;
    float2 const sums = pair_of(vectors.sums, j), norm = pair_of(vectors.norm_k, j);
    float2 const beta = pair_of(vectors.beta, j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const i = 16 * warp_tile.strip + lane.g + 8 * half;
      float const factor = kKeys ? -vectors.norm_k[i] : scale * vectors.norm_q[i];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        bool const exists = kKeys ? j + e < i : j + e <= i;
        float const decay = exp2_approx(vectors.sums[i] - (e == 0 ? sums.x : sums.y));
        float& value = d.tile[0][n][2 * half + e];
        // Above the diagonal 0 is selected, not multiplied by: the factors may be inf there.
        value = exists ? value * (factor * (e == 0 ? norm.x : norm.y)) * decay : 0.f;
        float const one = exists ? value * product.tile[0][n][2 * half + e] : 0.f;
        columns[2 * n + e] += one;
        value *= e == 0 ? beta.x : beta.y;
        (half == 0 ? row_sum.x : row_sum.y) += one * (e == 0 ? beta.x : beta.y);
      }
    }
  }
}

// Stores the warp's part of a square in 16 bits, and leaves its low part in `d`.
template <class Dtype>
__device__ __forceinline__ void store_square(Squares& d, uint32_t tile) {
  Lane const lane;
  WarpTile const warp_tile;
  if (!warp_tile.has_elements()) return;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& first = d.tile[0][n][2 * half];
      float& second = d.tile[0][n][2 * half + 1];
      uint32_t const word = Dtype::pack(first, second);
      int const row = 16 * warp_tile.strip + lane.g + 8 * half;
      ptx::shared_store(tile + Tile64::unit_offset(row, 2 * warp_tile.quarter + n) + 4 * lane.t,
                        word);
      first -= Dtype::unpack(static_cast<uint16_t>(word));
      second -= Dtype::unpack(static_cast<uint16_t>(word >> 16));
    }
  }
}

// Adds the products of the squares dQK and dKK to dQ and dK. Only 16 x 16 blocks on and below the
// diagonal are stored.
template <class Config, class Acc>
__device__ __forceinline__ void add_square_products(Acc& dq, Acc& dk, uint32_t tiles) {
  WarpTile const warp_tile;
  uint32_t const rows = warp_tile.strip * 16 * Tile64::kRowBytes + fragment_offset<Tile64>();
  uint32_t const transposed = transposed_offset(2 * warp_tile.strip);
  uint32_t const dqk = tiles + Config::kSquares, dkk = dqk + kTile64Bytes;
  uint32_t const q = column_fragments<Config>(tiles);
  uint32_t const k = column_fragments<Config>(tiles + Config::kK);
#pragma unroll Config::kUnroll
  for (int kk = 0; kk < 4; ++kk) {
    uint32_t a[4], b[4];
    if (kk <= warp_tile.strip) {
      ptx::ldmatrix_x4(a, Tile64::advance(dqk + rows, 2 * kk));
      ptx::ldmatrix_x4(b, Tile64::advance(dkk + rows, 2 * kk));
      add_products<Config>(dq, a, dk, b, k, 16 * kk);
    }
    if (kk >= warp_tile.strip) {
      ptx::ldmatrix_x4_trans(a, dqk + transposed + 16 * kk * Tile64::kRowBytes);
      ptx::ldmatrix_x4_trans(b, dkk + transposed + 16 * kk * Tile64::kRowBytes);
      add_product<Config>(dk, a, q, 16 * kk);
      add_product<Config>(dk, b, k, 16 * kk);
    }
  }
}

// Products with the states S and dS, without factors of rows.
template <class Config>
struct StateProducts {
  Accumulator<16, Config::kColumns> q, k, later;  // dOut S^T, dV S^T, R dS^T

  __device__ __forceinline__ void clear() {
    q.clear();
    k.clear();
    later.clear();
  }

  // Adds the products of a slot; that of dOut with `both` only.
  __device__ __forceinline__ void add(uint32_t slot, bool both) {
    WarpTile const warp_tile;
    uint32_t const rows =
        slot + warp_tile.strip * 16 * Tile64::kRowBytes + fragment_offset<Tile64>();
    uint32_t const transposed = slot + Config::kResiduals + transposed_offset(2 * warp_tile.strip);
    uint32_t const state = column_fragments<Config>(slot + Config::kState);
    uint32_t const grad_state = column_fragments<Config>(slot + Config::kGradState);
#pragma unroll Config::kUnroll
    for (int kk = 0; kk < 4; ++kk) {
      uint32_t a[4], b[4];
      ptx::ldmatrix_x4(a, Tile64::advance(rows + Config::kGradValues, 2 * kk));
      if (both) {
        ptx::ldmatrix_x4(b, Tile64::advance(rows + Config::kGradOut, 2 * kk));
        add_products<Config>(q, b, k, a, state, 16 * kk);
      } else {
        add_product<Config>(k, a, state, 16 * kk);
      }
      ptx::ldmatrix_x4_trans(a, transposed + 16 * kk * Tile64::kRowBytes);
      add_product<Config>(later, a, grad_state, 16 * kk);
    }
  }
};

// d += factors o e, one factor per row.
template <class Acc>
__device__ __forceinline__ void add_scaled(Acc& d, const Acc& e, const float (&factors)[2]) {
#pragma unroll
  for (int n = 0; n < Acc::kMmaCols; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      d.tile[0][n][i] = fmaf(factors[i / 2], e.tile[0][n][i], d.tile[0][n][i]);
    }
  }
}

// The thread's partial sum of the element-wise product of the images S^T and dS^T.
template <class Config>
__device__ __forceinline__ float state_products(const unsigned char* slot) {
  using Dtype = typename Config::Dtype;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < Config::Tile::kBytes; i += Config::kThreads * 16) {
    int const mine = i + static_cast<int>(threadIdx.x) * 16;
    uint4 const s = *reinterpret_cast<const uint4*>(slot + Config::kState + mine);
    uint4 const d = *reinterpret_cast<const uint4*>(slot + Config::kGradState + mine);
    sum = add_products_of<Dtype>(s, d, sum);
  }
  return sum;
}

// Stores rows of dQ or dK.
template <class Config, class Acc>
__device__ __forceinline__ void store_rows(const Acc& d, uint16_t* to, int64_t stride,
                                           int32_t count, int32_t head_dim) {
  using Dtype = typename Config::Dtype;
  Lane const lane;
  WarpTile const warp_tile;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = 16 * warp_tile.strip + lane.g + 8 * half;
#pragma unroll
    for (int n = 0; n < Acc::kMmaCols; ++n) {
      int const column = warp_tile.quarter * Config::kColumns + 8 * n + 2 * lane.t;
      const float (&pair)[4] = d.tile[0][n];
      if (row < count && column < head_dim) {
        *reinterpret_cast<uint32_t*>(to + row * stride + column) =
            Dtype::pack(pair[2 * half], pair[2 * half + 1]);
      }
    }
  }
}

// Gradient of the normalization of rows: removes the component along the row, d -= (x d) x / |x|^2.
// `along`: x d of rows g and g + 8.
template <class Config, class Acc>
__device__ __forceinline__ void subtract_along(Acc& d, uint32_t tile, const float* norm,
                                               const float (&along)[2]) {
  using Dtype = typename Config::Dtype;
  using Layout = typename Config::Tile;
  WarpTile const warp_tile;
  int const row = 16 * warp_tile.strip + Lane().g;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row + 8 * half;
    factor[half] = -along[half] * norm[i] * norm[i];
  }
  uint32_t const mine = column_fragments<Config>(tile) + warp_tile.strip * 16 * Layout::kRowBytes;
#pragma unroll
  for (int n = 0; n < Acc::kMmaCols; n += 2) {
    uint32_t words[4];
    ptx::ldmatrix_x4(words, Layout::advance(mine, n));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float (&pair)[4] = d.tile[0][n + i / 2];
      float& first = pair[i % 2 * 2];
      float& second = pair[i % 2 * 2 + 1];
      first = fmaf(factor[i % 2], Dtype::unpack(static_cast<uint16_t>(words[i])), first);
      second = fmaf(factor[i % 2], Dtype::unpack(static_cast<uint16_t>(words[i] >> 16)), second);
    }
  }
}

// The same for all columns, whose sums over the quarters are added up in `sums`.
template <class Config, class Acc>
__device__ __forceinline__ void project(Acc& d, uint32_t tile, const float* norm,
                                        float (&sums)[4][kChunk]) {
  WarpTile const warp_tile;
  int const row = 16 * warp_tile.strip + Lane().g;
  write_row_sums(sums[warp_tile.quarter], row_products<Config>(d, tile));
  __syncthreads();  // the warps of all quarters have written their sums
  float along[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row + 8 * half;
    along[half] = sums[0][i] + sums[1][i] + sums[2][i] + sums[3][i];
  }
  subtract_along<Config>(d, tile, norm, along);
}

}  // namespace flashvar::sm80::gated_delta_rule
