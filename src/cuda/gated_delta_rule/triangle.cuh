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
  static constexpr int kRowBytes = Swizzle::kUnits * kUnitBytes;
  // Bytes from a row's first 32 columns to its last 32.
  static constexpr int kColBlockBytes = kChunk / 2 * kRowBytes;
  static constexpr int kBytes = kTriangleBytes;
  static_assert(kBytes == 3 * kColBlockBytes);

  // As SmemLayout's (smem_layout.cuh).
  static __device__ __forceinline__ uint32_t unit_offset(uint32_t row, uint32_t unit) {
    return row * kRowBytes + ((unit ^ Swizzle::permute(row)) * kUnitBytes);
  }
  static __device__ __forceinline__ uint32_t advance(uint32_t address, int units) {
    return (address ^ (units % Swizzle::kUnits * kUnitBytes)) +
           units / Swizzle::kUnits * kColBlockBytes;
  }
};

}  // namespace flashvar::gated_delta_rule
