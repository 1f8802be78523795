// Moving tiles between global and shared memory, and the addresses that ldmatrix starts from.
#pragma once
#include "core/problem.h"
#include "core/smem_layout.cuh"
#include "core/unaligned.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"

namespace flashvar::sm80 {

// Starts copying rows [0, rows) of `gmem` into a tile, or all of them where kAllRows; rows past
// them and columns past `head_dim` become zeros. kAligned says that every row starts on 16 bytes:
// then the copies are asynchronous. All kThreads threads take part.
template <class Layout, int kThreads, bool kAligned, bool kAllRows = false>
__device__ __forceinline__ void load_tile(unsigned char* smem, const uint16_t* gmem, int64_t stride,
                                          int32_t rows, int32_t head_dim) {
  constexpr int kRowStep = kThreads / Layout::kPageChunks;
  static_assert(Layout::kRows % kRowStep == 0 && kRowStep % Layout::Swizzle::kPeriod == 0,
                "a thread's chunk keeps its place in the swizzle from row to row");
  int const thread = ptx::thread_index();
  int const chunk = thread % Layout::kPageChunks;
  int const row = thread / Layout::kPageChunks;
  // Counted from the thread's own place: constants are then compared with one register each.
  int32_t const rows_left = rows - row;
  int32_t const columns_left = head_dim - chunk * kChunkElements;
  unsigned char* const target = smem + Layout::chunk_offset(row, chunk);
  const uint16_t* source = gmem + row * stride + chunk * kChunkElements;
  constexpr int kUnroll = kAligned ? Layout::kRows / kRowStep : 1;  // few registers, slow as it is
#pragma unroll kUnroll
  for (int step = 0; step < Layout::kRows; step += kRowStep) {
#pragma unroll kUnroll
    for (int page = 0; page < Layout::kPages; ++page) {
      bool const valid = (kAllRows || step < rows_left) && page * Layout::kPageCols < columns_left;
      unsigned char* const slot = target + step * Layout::kRowBytes + page * Layout::kPageBytes;
      const uint16_t* const from = source + page * Layout::kPageCols;
      if constexpr (kAligned) {
        ptx::cp_async_16(ptx::smem_address(slot), from, valid);
      } else {
        *reinterpret_cast<uint4*>(slot) = valid ? load_unaligned(from) : uint4{0, 0, 0, 0};
      }
    }
    source += kRowStep * stride;
  }
}

// Writes the first `rows` of a warp's kWarpRows rows of a tile, which start at tile row
// `first_row`, to `gmem`, a row of which is head_dim long. The warp's lanes take part.
template <class Layout, int kWarpRows, bool kAligned>
__device__ __forceinline__ void store_rows(uint16_t* gmem, int64_t stride,
                                           const unsigned char* smem, int first_row, int32_t rows,
                                           int32_t head_dim) {
  constexpr int kRowStep = 32 / Layout::kPageChunks;
  int const lane = threadIdx.x % 32;
  int const chunk = lane % Layout::kPageChunks;
#pragma unroll
  for (int step = 0; step < kWarpRows; step += kRowStep) {
    int const row = step + lane / Layout::kPageChunks;
    const unsigned char* const slot = smem + Layout::chunk_offset(first_row + row, chunk);
#pragma unroll
    for (int page = 0; page < Layout::kPages; ++page) {
      int const column = page * Layout::kPageCols + chunk * kChunkElements;
      if (row >= rows || column >= head_dim) continue;
      uint4 const value = *reinterpret_cast<const uint4*>(slot + page * Layout::kPageBytes);
      uint16_t* const target = gmem + row * stride + column;
      if constexpr (kAligned) {
        *reinterpret_cast<uint4*>(target) = value;
      } else {
        store_unaligned(target, value);
      }
    }
  }
}

// Offset in a tile from which a lane reads its part of the 16 x 16 fragment at row 0, column 0 by
// ldmatrix_x4. The second of the four 8 x 8 matrices is eight rows down, the third one chunk to the
// right: the register order of operand a. Read so with .trans, the columns of V are operand b's:
// registers 0 and 1 are its first eight, 2 and 3 its second eight.
template <class Layout>
__device__ __forceinline__ uint32_t fragment_offset() {
  int const lane = threadIdx.x % 32;
  return Layout::chunk_offset(lane % 16, lane / 16);
}

// The same for rows that are columns of operand b, as those of K are: here the second matrix is one
// chunk to the right, the third eight rows down. In the other order each mma would want registers 0
// and 2 or 1 and 3, which have to be moved side by side first.
template <class Layout>
__device__ __forceinline__ uint32_t fragment_offset_b() {
  int const lane = threadIdx.x % 32;
  return Layout::chunk_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

}  // namespace flashvar::sm80
