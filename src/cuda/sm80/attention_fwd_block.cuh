// What a block computes: rows of one head of one sequence, and the keys that they see.
#pragma once
#include <cstdint>

#include "core/mask.cuh"
#include "core/problem.h"
#include "ptx/special_registers.cuh"

namespace flashvar::sm80 {

// Blocks of keys that rows of queries see: [begin, end). All of the rows see all keys of
// [all_begin, all_end).
struct KeyBlocks {
  int32_t begin, end;
  int32_t all_begin, all_end;

  __device__ __forceinline__ KeyBlocks(const Mask& mask, int32_t first_query, int32_t last_query,
                                       int32_t keys)
      : begin(mask.visible_begin(first_query) / keys),
        end((mask.visible_end(last_query) + keys - 1) / keys),
        all_begin((mask.visible_begin(last_query) + keys - 1) / keys),
        all_end(mask.visible_end(first_query) / keys) {}

  __device__ __forceinline__ bool has_mask(int32_t n) const {
    return n < all_begin || n >= all_end;
  }
};

// Blocks lie on the grid's x alone (y and z end at 65,535), the query block fastest and the last
// one first: under a causal mask it has the most to do.
struct Block {
  uint32_t batch, head;
  int32_t first_query;  // in its sequence; at the end or past it when there is nothing to do
  Span queries, keys;   // of the sequence
  bool is_spare;        // one block of each head where sequences are packed: has no queries

  // Of a head. Packed sequences get one more than they can need.
  static __host__ __device__ int64_t tiles(const AttentionProblem& problem, int32_t rows) {
    return problem.queries.tiles(problem.batch, rows) + (problem.queries.offsets != nullptr);
  }

  __device__ __forceinline__ Block(const AttentionProblem& problem, int32_t rows) {
    uint32_t const block = ptx::block_index();
    uint32_t const batches = static_cast<uint32_t>(problem.batch);
    if (problem.queries.offsets == nullptr) {
      uint32_t const blocks_q = (problem.queries.seqlen + rows - 1) / rows;
      uint32_t const head_and_batch = block / blocks_q;
      batch = head_and_batch / problem.heads_q;
      head = head_and_batch % problem.heads_q;
      first_query = (blocks_q - 1 - block % blocks_q) * rows;
      is_spare = false;
    } else {
      uint32_t const count = static_cast<uint32_t>(tiles(problem, rows));
      head = block / count;
      is_spare = block % count == 0;
      TilePosition const tile = problem.queries.find(count - 1 - block % count, batches, rows);
      batch = tile.batch;
      first_query = tile.first;
    }
    queries = problem.queries.span(batch);
    keys = problem.keys.span(batch);
    if (problem.seqused_k != nullptr) {
      keys.count = min(max(problem.seqused_k[batch], 0), keys.count);
    }
  }

  __device__ __forceinline__ KeyBlocks key_blocks(const AttentionProblem& problem, int32_t rows,
                                                  int32_t columns) const {
    int32_t const last_query = min(first_query + rows, queries.count) - 1;
    return KeyBlocks(mask(problem), first_query, last_query, columns);
  }

  // Where the blocks of keys end that some of its rows see; 0 where these rows are none.
  __device__ __forceinline__ int32_t key_blocks_end(const AttentionProblem& problem, int32_t row,
                                                    int32_t rows, int32_t columns) const {
    if (first_query + row >= queries.count) return 0;
    return (mask(problem).visible_end(first_query + row + rows - 1) + columns - 1) / columns;
  }

  __device__ __forceinline__ Mask mask(const AttentionProblem& problem) const {
    return {queries.count, keys.count, problem.window_left, problem.window_right};
  }

  // Of the block's first row in a tensor of queries.
  __device__ __forceinline__ int64_t query_offset(const TensorView& tensor) const {
    return batch * tensor.batch_stride + head * tensor.head_stride +
           int64_t{queries.first + first_query} * tensor.seq_stride;
  }

  // Of the sequence's first row in a tensor of keys or values.
  __device__ __forceinline__ int64_t key_offset(const TensorView& tensor, int32_t group) const {
    return batch * tensor.batch_stride + head / group * tensor.head_stride +
           keys.first * tensor.seq_stride;
  }

  __device__ __forceinline__ int64_t lse_offset(const AttentionProblem& problem) const {
    int64_t const row =
        problem.queries.offsets == nullptr
            ? (static_cast<int64_t>(batch) * problem.heads_q + head) * problem.queries.seqlen
            : int64_t{head} * problem.queries.total + queries.first;
    return row + first_query;
  }
};

// What the loop reads in shared memory, as its accumulators leave no registers for it.
struct SharedBlock {
  Block block;
  KeyBlocks key_blocks;
  const uint16_t* gK;  // first row of the sequence
  const uint16_t* gV;
};

}  // namespace flashvar::sm80
