// Rows of packed queries before the first sequence and after the last: they see no key, so their
// output is 0 and their LSE -inf.
#pragma once
#include <cstdint>

#include "core/online_softmax.cuh"
#include "core/problem.h"

namespace flashvar {

// Writes those of one head; `warps` warps share them.
__device__ __forceinline__ void store_outside_rows(const AttentionFwdProblem& problem,
                                                   uint32_t head, int32_t warp, int32_t warps) {
  int32_t const total = problem.queries.total;
  int32_t const begin = problem.queries.span(0).first;
  Span const last = problem.queries.span(static_cast<uint32_t>(problem.batch) - 1);
  int32_t const end = last.first + last.count;
  int32_t const lane = threadIdx.x % 32;
  for (int32_t row = warp; row < total; row += warps) {
    if (begin <= row && row < end) {
      row += (end - row - 1) / warps * warps;  // the warp's last row of a sequence
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

}  // namespace flashvar
