// Epilogues of mma accumulators: rounded into a tile of shared memory and from there to global
// memory, or added in fp32 to the workspace.
#pragma once
#include <cstdint>

#include "core/smem_layout.cuh"
#include "core/unaligned.cuh"
#include "ptx/global_add.cuh"
#include "ptx/special_registers.cuh"

namespace flashvar::sm80 {

// How the warps of a block hold a kRows x kCols tile of accumulators: in a grid of kRowWarps x
// kColWarps warps, where groups of 16 columns are assigned round-robin to the kColWarps.
template <int kRows_, int kCols_, int kRowWarps_, int kColWarps_>
struct GradTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kColWarps = kColWarps_;
  static constexpr int kWarps = kRowWarps * kColWarps;
  static constexpr int kWarpRows = kRows / kRowWarps;
  static constexpr int kMmaRows = kWarpRows / 16;
  static constexpr int kMmaCols = kCols / kColWarps / 8;
  static constexpr int kElements = kRows * kCols;

  // First column of a warp's mma tile n.
  static __device__ __forceinline__ int column(int warp, int n) {
    return (warp / kRowWarps + kColWarps * (n / 2)) * 16 + n % 2 * 8;
  }
  // A warp's first row.
  static __device__ __forceinline__ int row(int warp) { return warp % kRowWarps * kWarpRows; }

  // Layout of a tile in the workspace: accumulator by accumulator, with the 32 lanes of a warp
  // adjacent, so that every access of a warp is 128 contiguous bytes. offset(): of a lane's first
  // element; step(): from there to element e of mma tile (m, n).
  static __device__ __forceinline__ int offset(int warp, int lane) {
    return warp * kMmaRows * kMmaCols * 4 * 32 + lane;
  }
  static __device__ __forceinline__ constexpr int step(int m, int n, int e) {
    return ((m * kMmaCols + n) * 4 + e) * 32;
  }
};

// Multiplies a warp's accumulators by `scale`, rounds them and stores them into a shared tile, from
// tile row `row` on. unit(n): the 16-byte unit of the row that mma tile n goes to.
template <class Dtype, class Layout, class Acc, class Unit>
__device__ __forceinline__ void store_accumulator(unsigned char* smem, const Acc& c, int row,
                                                  float scale, Unit&& unit) {
  int const lane = ptx::thread_index() % 32;
#pragma unroll
  for (int m = 0; m < c.kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < c.kMmaCols; ++n) {
      int const to = unit(n);
      uint32_t const offset =
          Layout::unit_offset(row + m * 16 + lane / 4, to % Layout::kColBlockUnits) +
          to / Layout::kColBlockUnits * Layout::kColBlockBytes + lane % 4 * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint32_t*>(smem + offset + half * 8 * Layout::kRowBytes) =
            Dtype::pack(c.tile[m][n][half * 2] * scale, c.tile[m][n][half * 2 + 1] * scale);
      }
    }
  }
}

// Copies a warp's rows of a shared tile to global memory: the first `rows` of its kWarpRows rows,
// which start at tile row `first_row`. `gmem`: the first of them; rows are `columns` elements long,
// `stride` elements apart. All lanes of the warp take part.
template <class Layout, int kWarpRows, bool kAligned>
__device__ __forceinline__ void store_rows(uint16_t* gmem, int64_t stride,
                                           const unsigned char* smem, int first_row, int32_t rows,
                                           int32_t columns) {
  constexpr int kRowStep = 32 / Layout::kColBlockUnits;
  int const lane = threadIdx.x % 32;
  int const unit = lane % Layout::kColBlockUnits;
#pragma unroll
  for (int step = 0; step < kWarpRows; step += kRowStep) {
    int const row = step + lane / Layout::kColBlockUnits;
    const unsigned char* const slot = smem + Layout::unit_offset(first_row + row, unit);
#pragma unroll
    for (int col_block = 0; col_block < Layout::kColBlocks; ++col_block) {
      int const column = col_block * Layout::kColBlockCols + unit * kUnitElements;
      if (row >= rows || column >= columns) continue;
      uint4 const value =
          *reinterpret_cast<const uint4*>(slot + col_block * Layout::kColBlockBytes);
      uint16_t* const target = gmem + row * stride + column;
      if constexpr (kAligned) {
        *reinterpret_cast<uint4*>(target) = value;
      } else {
        store_unaligned(target, value);
      }
    }
  }
}

// Adds a warp's accumulators to a tile of the workspace (layout: GradTile), atomically.
template <class Tile, class Acc>
__device__ __forceinline__ void add_to_workspace(float* tile, const Acc& c, int warp) {
  float* const to = tile + Tile::offset(warp, ptx::thread_index() % 32);
#pragma unroll
  for (int m = 0; m < c.kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < c.kMmaCols; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::global_add(to + Tile::step(m, n, e), c.tile[m][n][e]);
    }
  }
}

}  // namespace flashvar::sm80
