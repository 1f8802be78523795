// The products of the backward, of operands in shared memory or in registers.
#pragma once
#include <cstdint>

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/special_registers.cuh"
#include "sm80/tiles.cuh"

namespace flashvar::sm80 {

// Accumulators of a warp: kRows x kCols as mma tiles of 16 x 8.
template <int kRows, int kCols>
struct Fragment {
  static constexpr int kMmaRows = kRows / 16;
  static constexpr int kMmaCols = kCols / 8;
  float tile[kMmaRows][kMmaCols][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kMmaRows; ++m) {
#pragma unroll
      for (int n = 0; n < kMmaCols; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) tile[m][n][e] = 0.f;
      }
    }
  }
};

// Two neighbouring accumulator tiles hold what one operand of 16 x 16 wants.
template <class Dtype, class Accumulator>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[4], const Accumulator& c, int m,
                                             int kk) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&pair)[4] = c.tile[m][2 * kk + i / 2];
    a[i] = Dtype::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
  }
}

// c = A B^T over kDepth columns; `a` and `b` are the addresses of the warp's first rows.
template <class Dtype, class LayoutA, class LayoutB, int kDepth, class Accumulator>
__device__ __forceinline__ void multiply_rows(Accumulator& c, uint32_t a, uint32_t b) {
  uint32_t const offset_a = a + fragment_offset<LayoutA>();
  uint32_t const offset_b = b + fragment_offset_b<LayoutB>();
  c.clear();
#pragma unroll
  for (int kk = 0; kk < kDepth / 16; ++kk) {
    uint32_t rA[Accumulator::kMmaRows][4];
#pragma unroll
    for (int m = 0; m < c.kMmaRows; ++m) {
      ptx::ldmatrix_x4(rA[m], LayoutA::advance(offset_a, 2 * kk) + m * 16 * LayoutA::kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < c.kMmaCols; n += 2) {
      uint32_t rB[4];
      ptx::ldmatrix_x4(rB, LayoutB::advance(offset_b, 2 * kk) + n * 8 * LayoutB::kRowBytes);
#pragma unroll
      for (int m = 0; m < c.kMmaRows; ++m) {
        ptx::mma_m16n8k16<Dtype>(c.tile[m][n], rA[m], rB[0], rB[1]);
        ptx::mma_m16n8k16<Dtype>(c.tile[m][n + 1], rA[m], rB[2], rB[3]);
      }
    }
  }
}

// c += A B, where `load_a(operand, m, kk)` gives 16 x 16 of A, B's rows are kDepth tile rows, and
// `b` is the address of B's fragment at row 0 and the warp's first columns. kColWarps warps take
// turns at groups of 16 columns.
template <class Dtype, class LayoutB, int kDepth, int kColWarps, class Accumulator, class LoadA>
__device__ __forceinline__ void multiply_columns(Accumulator& c, uint32_t b, LoadA&& load_a) {
#pragma unroll
  for (int kk = 0; kk < kDepth / 16; ++kk) {
    uint32_t rA[Accumulator::kMmaRows][4];
#pragma unroll
    for (int m = 0; m < c.kMmaRows; ++m) load_a(rA[m], m, kk);
#pragma unroll
    for (int n = 0; n < c.kMmaCols; n += 2) {
      uint32_t rB[4];
      ptx::ldmatrix_x4_trans(rB, LayoutB::advance(b, n * kColWarps) + kk * 16 * LayoutB::kRowBytes);
#pragma unroll
      for (int m = 0; m < c.kMmaRows; ++m) {
        ptx::mma_m16n8k16<Dtype>(c.tile[m][n], rA[m], rB[0], rB[1]);
        ptx::mma_m16n8k16<Dtype>(c.tile[m][n + 1], rA[m], rB[2], rB[3]);
      }
    }
  }
}

// Writes a warp's accumulators, rounded, into a tile; they start at tile row `row` and chunk
// `chunk`, and chunk(n) chunks further on lies mma tile n.
template <class Dtype, class Layout, class Accumulator, class Chunk>
__device__ __forceinline__ void store_fragment(unsigned char* smem, const Accumulator& c, int row,
                                               float scale, Chunk&& chunk) {
  int const lane = ptx::thread_index() % 32;
#pragma unroll
  for (int m = 0; m < c.kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < c.kMmaCols; ++n) {
      int const to = chunk(n);
      uint32_t const offset =
          Layout::chunk_offset(row + m * 16 + lane / 4, to % Layout::kPageChunks) +
          to / Layout::kPageChunks * Layout::kPageBytes + lane % 4 * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint32_t*>(smem + offset + half * 8 * Layout::kRowBytes) =
            Dtype::pack(c.tile[m][n][half * 2] * scale, c.tile[m][n][half * 2 + 1] * scale);
      }
    }
  }
}

// Adds a warp's accumulators to a tile of the workspace.
template <class Tile, class Accumulator>
__device__ __forceinline__ void add_to_workspace(float* tile, const Accumulator& c, int warp) {
  float* const to = tile + Tile::place(warp, ptx::thread_index() % 32);
#pragma unroll
  for (int m = 0; m < c.kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < c.kMmaCols; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + Tile::step(m, n, e)),
                     "f"(c.tile[m][n][e])
                     : "memory");
      }
    }
  }
}

}  // namespace flashvar::sm80
