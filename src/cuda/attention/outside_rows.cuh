// Rows of varlen tensors that belong to no sequence: those before the first offset and after the
// last. They get defined values: output and gradients 0, LSE -inf.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "core/math.cuh"

namespace flashvar::attention {

// Writes output and LSE of the outside rows of one query head; `warps` warps share the rows.
__device__ __forceinline__ void store_outside_rows(const FwdProblem& problem, uint32_t head,
                                                   int32_t warp, int32_t warps) {
  int32_t const total = problem.queries.total;
  int32_t const begin = problem.queries.span(0).first;
  Span const last = problem.queries.span(static_cast<uint32_t>(problem.batch) - 1);
  int32_t const end = last.first + last.count;
  int32_t const lane = threadIdx.x % 32;
  for (int32_t row = warp; row < total; row += warps) {
    if (begin <= row && row < end) {
      // Skips to this warp's last row inside a sequence; the loop's step leads past it.
      row += (end - row - 1) / warps * warps;
      continue;
    }
    uint16_t* const gO =
        problem.out.data + row * problem.out.seq_stride + head * problem.out.head_stride;
    for (int32_t column = lane; column < problem.head_dim_v; column += 32) gO[column] = 0;
    if (problem.lse != nullptr && lane == 0) {
      problem.lse[int64_t{head} * total + row] = -infinity();
    }
  }
}

// Zeros the outside rows of a gradient; all blocks of the grid share the rows.
__device__ __forceinline__ void zero_outside_rows(const Tensor& tensor, const Sequences& sequences,
                                                  int64_t batches, int32_t heads,
                                                  int32_t head_dim) {
  if (sequences.offsets == nullptr) return;
  int32_t const total = sequences.total;
  int32_t const begin = min(max(sequences.offsets[0], 0), total);
  int32_t const end = min(max(sequences.offsets[batches], begin), total);
  int64_t const outside = int64_t{total - (end - begin)} * heads;
  for (int64_t i = blockIdx.x; i < outside; i += gridDim.x) {
    int64_t const row = i / heads < begin ? i / heads : i / heads - begin + end;
    uint16_t* const to = tensor.data + row * tensor.seq_stride + i % heads * tensor.head_stride;
    for (int column = threadIdx.x; column < head_dim; column += blockDim.x) to[column] = 0;
  }
}

}  // namespace flashvar::attention
