// Layout of a record's lower triangular matrix of 64 x 64 elements of 16 bits, in memory and in
// shared memory: columns 0 to 31 of all rows, then columns 32 to 63 of rows 32 to 63; swizzled as
// by SWIZZLE_64B (rows of 64 bytes). Stored elements above the diagonal are 0.
#pragma once
#include <cstdint>

#include "core/smem_layout.cuh"
#include "gated_delta_rule/chunk.h"

namespace flashvar::gated_delta_rule {

struct Triangle {
  using Swizzle = Swizzle64B;
  static constexpr int kRowBytes = Swizzle::kChunks * kChunkBytes;
  // Bytes from a row's first 32 columns to its last 32.
  static constexpr int kColBlockBytes = kChunk / 2 * kRowBytes;
  static constexpr int kBytes = kTriangleBytes;
  static_assert(kBytes == 3 * kColBlockBytes);

  // As SmemLayout's (smem_layout.cuh).
  static __device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    return row * kRowBytes + ((chunk ^ Swizzle::permute(row)) * kChunkBytes);
  }
  static __device__ __forceinline__ uint32_t advance(uint32_t address, int chunks) {
    return (address ^ (chunks % Swizzle::kChunks * kChunkBytes)) +
           chunks / Swizzle::kChunks * kColBlockBytes;
  }
};

// Copies rows 8 m to 8 m + 7 of a matrix, with zeros from column 8 * chunks on. `from`: those rows,
// swizzled as by SWIZZLE_128B (rows of 128 bytes). Called by one warp.
__device__ __forceinline__ void copy_triangle_rows(uint16_t* triangle, const unsigned char* from,
                                                   int m, int chunks) {
  // Eight consecutive lanes have two rows, four apart, so that they read from all banks.
  int const lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4 % 2 * 4 + lane / 8;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    if (8 * m < kChunk / 2 * block) break;  // the rows' last 32 columns are not stored
    int const chunk = 4 * block + (lane % 4 ^ static_cast<int>(Triangle::Swizzle::permute(row)));
    uint4 words{};
    if (chunk < chunks) {
      words = *reinterpret_cast<const uint4*>(from + row * 128 + (chunk ^ row) * kChunkBytes);
    }
    *reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(triangle) +
                              block * Triangle::kColBlockBytes +
                              (8 * m + row) * Triangle::kRowBytes + lane % 4 * kChunkBytes) = words;
  }
}

}  // namespace flashvar::gated_delta_rule
