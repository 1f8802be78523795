// Warp-level GEMMs with mma.sync m16n8k16: operands in shared memory (ldmatrix) or, A only, in
// registers; accumulators in fp32.
#pragma once
#include <cstdint>

#include "core/smem_layout.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/special_registers.cuh"

namespace flashvar::sm80 {

// A warp's kRows x kCols accumulators, as mma tiles of 16 x 8. Element e of tile[m][n] is at row m
// * 16 + lane / 4 + e / 2 * 8 and column n * 8 + lane % 4 * 2 + e % 2.
template <int kRows, int kCols>
struct Accumulator {
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

// Operand A of k-step kk, packed from two adjacent accumulator tiles: accumulators C and operand A
// of mma have the same layout.
template <class Dtype, class Acc>
__device__ __forceinline__ void pack_a(uint32_t (&a)[4], const Acc& c, int m, int kk) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&pair)[4] = c.tile[m][2 * kk + i / 2];
    a[i] = Dtype::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
  }
}

// The lane's ldmatrix_x4 offset of the 16 x 16 fragment at row 0, column 0 of a tile. The four 8x8
// matrices are at (row, column) (0, 0), (8, 0), (0, 8), (8, 8): the order of operand A's registers.
// With ldmatrix_x4_trans this order gives operand B of a tile whose rows are k (V): registers 0 and
// 1 are its first eight columns, 2 and 3 the others.
template <class Layout>
__device__ __forceinline__ uint32_t fragment_offset() {
  int const lane = threadIdx.x % 32;
  return Layout::unit_offset(lane % 16, lane / 16);
}

// The lane's ldmatrix_x4 offset for operand B of a tile whose columns are k (K). The matrices are
// at (0, 0), (0, 8), (8, 0), (8, 8), so that each mma reads two consecutive registers; in operand
// A's order the registers would have to be moved.
template <class Layout>
__device__ __forceinline__ uint32_t fragment_offset_b() {
  int const lane = threadIdx.x % 32;
  return Layout::unit_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// The lane's address of a fragment, from which unit() makes the address of the fragment `units`
// units to the right.
template <class Layout_>
struct FragmentAddress {
  using Layout = Layout_;
  uint32_t address;

  __device__ __forceinline__ uint32_t unit(int units) const {
    return Layout::advance(address, units);
  }
};

// FragmentAddress with the offset in the tile kept apart from the tile's address. The forward needs
// it: with FragmentAddress it spills registers at 128 columns on sm_90.
template <class Layout_>
struct FragmentOffset {
  using Layout = Layout_;
  uint32_t tile, offset;

  __device__ __forceinline__ uint32_t unit(int units) const {
    return tile + Layout::advance(offset, units);
  }
};

// c = A B^T over kDepth columns of both tiles ("nt": B transposed). `a` and `b`: the fragments at
// the warp's first rows and column 0 (fragment_offset, fragment_offset_b).
template <class Dtype, int kDepth, class Acc, class A, class B>
__device__ __forceinline__ void gemm_nt(Acc& c, const A& a, const B& b) {
  c.clear();
#pragma unroll
  for (int kk = 0; kk < kDepth / 16; ++kk) {
    uint32_t rA[Acc::kMmaRows][4];
#pragma unroll
    for (int m = 0; m < c.kMmaRows; ++m) {
      ptx::ldmatrix_x4(rA[m], a.unit(2 * kk) + m * 16 * A::Layout::kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < c.kMmaCols; n += 2) {
      uint32_t rB[4];
      ptx::ldmatrix_x4(rB, b.unit(2 * kk) + n * 8 * B::Layout::kRowBytes);
#pragma unroll
      for (int m = 0; m < c.kMmaRows; ++m) {
        ptx::mma_m16n8k16<Dtype>(c.tile[m][n], rA[m], rB[0], rB[1]);
        ptx::mma_m16n8k16<Dtype>(c.tile[m][n + 1], rA[m], rB[2], rB[3]);
      }
    }
  }
}

// c = A B^T with the shared-memory addresses of the warp's first rows of both tiles.
template <class Dtype, class LayoutA, class LayoutB, int kDepth, class Acc>
__device__ __forceinline__ void gemm_nt(Acc& c, uint32_t a, uint32_t b) {
  gemm_nt<Dtype, kDepth>(c, FragmentAddress<LayoutA>{a + fragment_offset<LayoutA>()},
                         FragmentAddress<LayoutB>{b + fragment_offset_b<LayoutB>()});
}

// c += A B over kDepth rows of B ("nn"). load_a(operand, m, kk) gives fragment (m, kk) of A; `b`:
// the fragment of B at row 0 and the warp's first columns. Groups of 16 columns are assigned
// round-robin to kColWarps warps.
template <class Dtype, int kDepth, int kColWarps, class Acc, class B, class LoadA>
__device__ __forceinline__ void gemm_nn(Acc& c, const B& b, LoadA&& load_a) {
#pragma unroll
  for (int kk = 0; kk < kDepth / 16; ++kk) {
    uint32_t rA[Acc::kMmaRows][4];
#pragma unroll
    for (int m = 0; m < c.kMmaRows; ++m) load_a(rA[m], m, kk);
#pragma unroll
    for (int n = 0; n < c.kMmaCols; n += 2) {
      uint32_t rB[4];
      ptx::ldmatrix_x4_trans(rB, b.unit(n * kColWarps) + kk * 16 * B::Layout::kRowBytes);
#pragma unroll
      for (int m = 0; m < c.kMmaRows; ++m) {
        ptx::mma_m16n8k16<Dtype>(c.tile[m][n], rA[m], rB[0], rB[1]);
        ptx::mma_m16n8k16<Dtype>(c.tile[m][n + 1], rA[m], rB[2], rB[3]);
      }
    }
  }
}

}  // namespace flashvar::sm80
