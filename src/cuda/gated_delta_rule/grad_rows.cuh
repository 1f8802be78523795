// What kernels of rows in the backward share: their items, a record's vectors in shared memory,
// sums.
#pragma once
#include <cstddef>
#include <cstdint>

#include "gated_delta_rule/grad_chunk.h"
#include "gated_delta_rule/problem.h"

namespace flashvar::gated_delta_rule {

// A chunk and a head of q and k, whose heads of v are added up.
struct RowsItem {
  uint32_t slot, head_qk;
  int32_t batch;          // coordinate in dense tensors
  int32_t begin, length;  // of the sequence
  int32_t first;          // row in the sequence

  RowsItem() = default;
  // The item numbered `item`: slots times heads of q and k. Called by whole warps.
  __device__ __forceinline__ RowsItem(const FwdProblem& problem, uint32_t item)
      : slot(item / static_cast<uint32_t>(problem.heads_qk)),
        head_qk(item - slot * problem.heads_qk) {
    TileCoordinate const chunk = problem.rows.find(slot, problem.sequences, kChunk);
    Span const span = problem.rows.span(chunk.batch);
    batch = problem.rows.offsets == nullptr ? static_cast<int32_t>(chunk.batch) : 0;
    begin = span.first;
    length = span.count;
    first = chunk.first;
  }

  // Rows of the sequence from the chunk's first on; none in surplus chunks.
  __device__ __forceinline__ int32_t count() const { return length - first; }

  // The group's `i`-th head, and the number of its record.
  __device__ __forceinline__ uint32_t head(const FwdProblem& problem, int32_t i) const {
    return head_qk * problem.group + i;
  }
  __device__ __forceinline__ int64_t record(const FwdProblem& problem, int32_t i) const {
    return int64_t{slot} * problem.heads + head(problem, i);
  }

  // Whether the chunk is careful in one of the heads. Called by whole warps, of chunks with rows.
  __device__ __forceinline__ bool careful(const FwdProblem& problem,
                                          const GradWorkspace& workspace) const {
    bool found = false;
    for (int32_t i = threadIdx.x % 32; i < problem.group; i += 32) {
      found = found || workspace.records[record(problem, i)].growth > kCarefulGrowth;
    }
    return __any_sync(0xffffffffu, found);
  }
};

// A buffer of rows_kernel in shared memory: what the chains left of a head's 64 columns of V.
// kTileBytes: of an image of S^T or dS^T.
template <int kTileBytes>
struct RowsSlot {
  static constexpr int kGradOut = 0;                             // dOut
  static constexpr int kGradValues = kGradOut + kSquareBytes;    // dV
  static constexpr int kResiduals = kGradValues + kSquareBytes;  // R^T
  static constexpr int kState = kResiduals + kSquareBytes;       // S^T
  static constexpr int kGradState = kState + kTileBytes;         // dS^T
  static constexpr int kSlotBytes = kGradState + kTileBytes;
};

// The vectors of a record in shared memory, in its order.
struct RecordRows {
  float a[kChunk], b[kChunk], c[kChunk];
  float decay, growth;
  float unused[kChunk - 2];
  float beta[kChunk], sums[kChunk], norm_q[kChunk], norm_k[kChunk];
};
static_assert(sizeof(RecordRows) == offsetof(GradRecord, inverse_low) - offsetof(GradRecord, a));

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// sum + the products of eight elements each.
template <class Dtype>
__device__ __forceinline__ float add_products_of(const uint4& one, const uint4& other, float sum) {
  uint32_t const words[2][4] = {{one.x, one.y, one.z, one.w}, {other.x, other.y, other.z, other.w}};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    sum = fmaf(Dtype::unpack(static_cast<uint16_t>(words[0][n])),
               Dtype::unpack(static_cast<uint16_t>(words[1][n])), sum);
    sum = fmaf(Dtype::unpack(static_cast<uint16_t>(words[0][n] >> 16)),
               Dtype::unpack(static_cast<uint16_t>(words[1][n] >> 16)), sum);
  }
  return sum;
}

}  // namespace flashvar::gated_delta_rule
