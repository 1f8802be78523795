// load_tile(): global to shared memory with cp.async.
#pragma once
#include <cstdint>

#include "core/smem_layout.cuh"
#include "core/unaligned.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"

namespace flashvar::sm80 {

// Loads rows [0, rows) of `gmem` into a tile, or all rows with kAllRows. The tile's other rows, and
// its columns from `columns` on, become zeros. All kThreads threads take part. kAligned: every row
// starts at a multiple of 16 bytes; the copies are asynchronous and belong to the thread's open
// cp.async group. Not kAligned: the thread's copies are complete on return.
template <class Layout, int kThreads, bool kAligned, bool kAllRows = false>
__device__ __forceinline__ void load_tile(unsigned char* smem, const uint16_t* gmem, int64_t stride,
                                          int32_t rows, int32_t columns) {
  constexpr int kRowStep = kThreads / Layout::kColBlockUnits;
  static_assert(Layout::kRows % kRowStep == 0 && kRowStep % Layout::Swizzle::kPeriod == 0,
                "a thread's unit keeps its place in the swizzle from row to row");
  int const thread = ptx::thread_index();
  int const unit = thread % Layout::kColBlockUnits;
  int const row = thread / Layout::kColBlockUnits;
  // Limits relative to this thread's first element: unrolled steps compare constants with one
  // register.
  int32_t const rows_left = rows - row;
  int32_t const columns_left = columns - unit * kUnitElements;
  unsigned char* const target = smem + Layout::unit_offset(row, unit);
  const uint16_t* source = gmem + row * stride + unit * kUnitElements;
  constexpr int kUnroll =
      kAligned ? Layout::kRows / kRowStep : 1;  // rolled: saves registers on a slow path
#pragma unroll kUnroll
  for (int step = 0; step < Layout::kRows; step += kRowStep) {
#pragma unroll kUnroll
    for (int col_block = 0; col_block < Layout::kColBlocks; ++col_block) {
      bool const valid =
          (kAllRows || step < rows_left) && col_block * Layout::kColBlockCols < columns_left;
      unsigned char* const slot =
          target + step * Layout::kRowBytes + col_block * Layout::kColBlockBytes;
      const uint16_t* const from = source + col_block * Layout::kColBlockCols;
      if constexpr (kAligned) {
        ptx::cp_async_16(ptx::smem_address(slot), from, valid);
      } else {
        *reinterpret_cast<uint4*>(slot) = valid ? load_unaligned(from) : uint4{0, 0, 0, 0};
      }
    }
    source += kRowStep * stride;
  }
}

}  // namespace flashvar::sm80
