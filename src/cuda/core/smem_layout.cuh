// Layout of shared-memory tiles that ldmatrix reads and 16-byte stores fill without bank conflicts.
//
// A tile of kRows x kCols is stored as column blocks of kColBlockCols columns, one swizzle atom
// wide. Within a column block the 16-byte units of a row are permuted by the row's index, so that
// eight consecutive rows of one logical column fall into eight different groups of banks.
#pragma once
#include <cstdint>

namespace flashvar {

inline constexpr int kUnitBytes = 16;
inline constexpr int kUnitElements = 8;  // of 16 bits: of bf16 or fp16

// Rows of 128 bytes: unit ^= row % 8.
struct Swizzle128B {
  static constexpr int kUnits = 8;   // per row of a column block
  static constexpr int kPeriod = 8;  // rows after which the permutation repeats
  static __device__ __forceinline__ uint32_t permute(uint32_t row) { return row & 7; }
};

// Rows of 64 bytes, of which two cover all 32 banks: unit ^= (row / 2) % 4.
struct Swizzle64B {
  static constexpr int kUnits = 4;
  static constexpr int kPeriod = 8;
  static __device__ __forceinline__ uint32_t permute(uint32_t row) { return (row >> 1) & 3; }
};

template <bool kCondition, class A, class B>
struct Select {
  using type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using type = B;
};

template <int kRows_, int kCols_, int kElementBytes = 2>
struct SmemLayout {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  using Swizzle = typename Select<kCols * kElementBytes % 128 == 0, Swizzle128B, Swizzle64B>::type;
  static constexpr int kColBlockUnits = Swizzle::kUnits;
  static constexpr int kColBlockCols = kColBlockUnits * kUnitBytes / kElementBytes;
  static constexpr int kColBlocks = kCols / kColBlockCols;
  static constexpr int kRowBytes = kColBlockUnits * kUnitBytes;
  static constexpr int kColBlockBytes = kRows * kRowBytes;
  static constexpr int kBytes = kColBlocks * kColBlockBytes;
  static_assert(kCols % kColBlockCols == 0, "columns must fill whole column blocks");
  static_assert(kRows % Swizzle::kPeriod == 0, "rows must fill whole swizzle periods");

  // Byte offset of a 16-byte unit of the first column block.
  static __device__ __forceinline__ uint32_t unit_offset(uint32_t row, uint32_t unit) {
    return row * kRowBytes + ((unit ^ Swizzle::permute(row)) * kUnitBytes);
  }

  // The address of the unit that lies `units` units to the right of `address`, which
  // unit_offset() made. Precondition: the unit number and `units` share no bit. Then addition is
  // XOR, which commutes with the permutation (rows are aligned to their size).
  static __device__ __forceinline__ uint32_t advance(uint32_t address, int units) {
    return (address ^ ((units % kColBlockUnits) * kUnitBytes)) +
           (units / kColBlockUnits) * kColBlockBytes;
  }
};

}  // namespace flashvar
