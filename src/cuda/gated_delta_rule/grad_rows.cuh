// Parts, for both families, of rows_kernel, which computes dQ and dK: its work items, and the
// vectors of a record in shared memory.
#pragma once
#include <cstddef>
#include <cstdint>

#include "gated_delta_rule/grad_chunk.h"
#include "gated_delta_rule/problem.h"

namespace flashvar::gated_delta_rule {

// A work item: a chunk of one head of q and k. Its gradients are sums over the heads of v that
// share the head.
struct RowsItem {
  uint32_t slot, head_qk;
  int32_t batch;          // batch index of dense tensors; 0: varlen
  int32_t begin, length;  // of the sequence
  int32_t first;          // row in the sequence

  RowsItem() = default;
  // Item number `item` of slots x heads of q and k. Precondition: the warp is converged.
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

  // Rows of the sequence from the chunk's first on; 0 or less: a surplus chunk.
  __device__ __forceinline__ int32_t count() const { return length - first; }

  // Head i of the group, and the index of its record.
  __device__ __forceinline__ uint32_t head(const FwdProblem& problem, int32_t i) const {
    return head_qk * problem.group + i;
  }
  __device__ __forceinline__ int64_t record(const FwdProblem& problem, int32_t i) const {
    return int64_t{slot} * problem.heads + head(problem, i);
  }

  // Whether the chunk is careful in any head of the group. Preconditions: the warp is converged,
  // the chunk has rows.
  __device__ __forceinline__ bool careful(const FwdProblem& problem,
                                          const GradWorkspace& workspace) const {
    bool found = false;
    for (int32_t i = threadIdx.x % 32; i < problem.group; i += 32) {
      found = found || workspace.records[record(problem, i)].growth > kCarefulGrowth;
    }
    return __any_sync(0xffffffffu, found);
  }
};

// Byte offsets in a slot, a buffer of rows_kernel for what the chains wrote of one head and 64
// columns of V. kTileBytes: size of an image of S^T or dS^T.
template <int kTileBytes>
struct RowsSlot {
  static constexpr int kGradOut = 0;                             // dOut
  static constexpr int kGradValues = kGradOut + kTile64Bytes;    // dV
  static constexpr int kResiduals = kGradValues + kTile64Bytes;  // R^T
  static constexpr int kState = kResiduals + kTile64Bytes;       // S^T
  static constexpr int kGradState = kState + kTileBytes;         // dS^T
  static constexpr int kSlotBytes = kGradState + kTileBytes;
};

// The vectors of a GradRecord as they lie in shared memory.
struct RecordVectors {
  float a[kChunk], b[kChunk], c[kChunk];
  float decay, growth;
  float unused[kChunk - 2];
  float beta[kChunk], sums[kChunk], norm_q[kChunk], norm_k[kChunk];
};
static_assert(sizeof(RecordVectors) ==
              offsetof(GradRecord, solution_low) - offsetof(GradRecord, a));

}  // namespace flashvar::gated_delta_rule
