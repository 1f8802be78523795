// Rows of packed tensors before the first sequence and after the last: they are written as well.
#pragma once
#include <cstdint>

#include "core/sequences.cuh"

namespace flashvar::sm80 {

// Calls visit(row, head) for every such row of a tensor, the blocks of the grid taking turns: all
// threads of a block visit the same row.
template <class Visit>
__device__ __forceinline__ void for_each_outside_row(const Sequences& sequences, int64_t batches,
                                                     int32_t heads, Visit&& visit) {
  if (sequences.offsets == nullptr) return;
  int32_t const total = sequences.total;
  int32_t const begin = min(max(sequences.offsets[0], 0), total);
  int32_t const end = min(max(sequences.offsets[batches], begin), total);
  int64_t const outside = int64_t{total - (end - begin)} * heads;
  for (int64_t i = blockIdx.x; i < outside; i += gridDim.x) {
    int32_t const row = static_cast<int32_t>(i / heads);
    visit(row < begin ? row : row - begin + end, static_cast<int32_t>(i % heads));
  }
}

}  // namespace flashvar::sm80
