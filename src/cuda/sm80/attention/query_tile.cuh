// The query tile that a block owns: rows of one head of one sequence, and the key blocks visible to
// them.
#pragma once
#include <cstdint>
#include <type_traits>

#include "attention/mask.cuh"
#include "attention/problem.h"
#include "core/ceil_div.h"
#include "ptx/special_registers.cuh"

namespace flashvar::sm80::attention {

using namespace flashvar::attention;  // what all architectures share

// Key blocks [begin, end) are visible to some row of a query tile. Those of [full_begin, full_end)
// are visible as a whole to all rows: they need no mask.
struct KeyBlockRange {
  int32_t begin, end;
  int32_t full_begin, full_end;

  __device__ __forceinline__ KeyBlockRange(const Mask& mask, int32_t first_query,
                                           int32_t last_query, int32_t keys)
      : begin(mask.key_begin(first_query) / keys),
        end(ceil_div(mask.key_end(last_query), keys)),
        full_begin(ceil_div(mask.key_begin(last_query), keys)),
        full_end(mask.key_end(first_query) / keys) {}

  __device__ __forceinline__ bool needs_mask(int32_t n) const {
    return n < full_begin || n >= full_end;
  }
};

// Query tile of this block. The grid has one dimension (y and z are limited to 65,535). Query tiles
// vary fastest, and the last comes first: under a causal mask it has the most work.
struct QueryTile {
  uint32_t batch, head;
  uint32_t split;       // with kSplits (KeySplits)
  int32_t first_query;  // within its sequence; past its end: the block has no work
  Span queries, keys;   // of the sequence; queries: its rows; keys: the keys in use
  bool is_spare;        // varlen: the one tile of each head that never has queries

  // Tiles per head. Varlen: one more than any lengths need; its block writes the outside rows.
  static __host__ __device__ int64_t tiles(const Problem& problem, int32_t rows) {
    return problem.queries.tiles(problem.batch, rows) + (problem.queries.offsets != nullptr);
  }

  // kSplits: whether there may be several splits, or PackGQA.
  template <bool kSplits = false>
  __device__ __forceinline__ QueryTile(const Problem& problem, int32_t rows,
                                       std::bool_constant<kSplits> = {}) {
    uint32_t const block = ptx::block_index();
    uint32_t const splits = kSplits ? problem.splits.count : 1;
    uint32_t const batches = static_cast<uint32_t>(problem.batch);
    if (problem.queries.offsets == nullptr) {
      uint32_t const blocks_q = ceil_div(problem.queries.seqlen, rows);
      uint32_t const split_head = block / blocks_q;
      uint32_t const head_and_batch = split_head / splits;
      split = split_head % splits;
      batch = head_and_batch / problem.heads_q;
      head = head_and_batch % problem.heads_q;
      first_query = (blocks_q - 1 - block % blocks_q) * rows;
      is_spare = false;
    } else {
      uint32_t const count = static_cast<uint32_t>(tiles(problem, rows));
      uint32_t const split_head = block / count;
      head = split_head / splits;
      split = split_head % splits;
      is_spare = block % count == 0 && split == 0;
      TileCoordinate const tile = problem.queries.find(count - 1 - block % count, batches, rows);
      batch = tile.batch;
      first_query = tile.first;
    }
    queries = problem.queries.span(batch);
    keys = problem.keys_in_use(batch);
  }

  // With kSplits, those of the split.
  template <bool kSplits = false>
  __device__ __forceinline__ KeyBlockRange key_blocks(const Problem& problem, int32_t rows,
                                                      int32_t columns) const {
    int32_t const last_query = min(first_query + rows, queries.count) - 1;
    int32_t const shift = row_shift<kSplits>(problem);
    KeyBlockRange blocks(mask<kSplits>(problem), first_query >> shift, last_query >> shift,
                         columns);
    if constexpr (kSplits) {
      uint32_t const splits = problem.splits.count;
      int32_t const size = ceil_div(max(blocks.end - blocks.begin, 0), splits);
      blocks.begin += static_cast<int32_t>(split) * size;
      blocks.end = min(blocks.begin + size, blocks.end);
    }
    return blocks;
  }

  // End of the key blocks visible to `rows` rows from tile row `row` on; 0 where the sequence has
  // no such row.
  template <bool kSplits = false>
  __device__ __forceinline__ int32_t key_blocks_end(const Problem& problem, int32_t row,
                                                    int32_t rows, int32_t columns) const {
    if (first_query + row >= queries.count) return 0;
    int32_t const last = (first_query + row + rows - 1) >> row_shift<kSplits>(problem);
    return ceil_div(mask<kSplits>(problem).key_end(last), columns);
  }

  template <bool kSplits = false>
  __device__ __forceinline__ Mask mask(const Problem& problem) const {
    return {queries.count >> row_shift<kSplits>(problem), keys.count, problem.window_left,
            problem.window_right};
  }

  // KeySplits::row_shift.
  template <bool kSplits>
  static __device__ __forceinline__ int32_t row_shift(const Problem& problem) {
    return kSplits ? problem.splits.row_shift : 0;
  }

  // Offset of the tile's first row in a tensor with query rows.
  __device__ __forceinline__ int64_t query_offset(const Tensor& tensor) const {
    return batch * tensor.batch_stride + head * tensor.head_stride +
           int64_t{queries.first + first_query} * tensor.seq_stride;
  }

  // The same in q; with kSplits, where varlen queries may be in a dense problem (PackGQA).
  template <bool kSplits>
  __device__ __forceinline__ int64_t q_offset(const Problem& problem) const {
    QueryTile tile = *this;
    if constexpr (kSplits) {
      tile.batch = problem.batch_of_queries(batch);
      tile.first_query >>= problem.splits.row_shift;
    }
    return tile.query_offset(problem.q);
  }

  // Offset of the sequence's first row in K or V.
  __device__ __forceinline__ int64_t key_offset(const Tensor& tensor, int32_t group) const {
    return batch * tensor.batch_stride + head / group * tensor.head_stride +
           keys.first * tensor.seq_stride;
  }

  // Offset of the tile's first row in the LSE; with kSplits, in that of the split heads.
  template <bool kSplits = false>
  __device__ __forceinline__ int64_t lse_offset(const Problem& problem) const {
    bool const varlen = problem.queries.offsets != nullptr;
    int64_t of_head = varlen ? head : int64_t{batch} * problem.heads_q + head;
    if constexpr (kSplits) of_head = of_head * problem.splits.count + split;
    int64_t const row =
        varlen ? of_head * problem.queries.total + queries.first : of_head * problem.queries.seqlen;
    return row + first_query;
  }
};

// Constants of the main loop, in shared memory because the accumulators leave no registers for
// them.
struct SharedQueryTile {
  QueryTile tile;
  KeyBlockRange key_blocks;
  const uint16_t* gK;  // the sequence's first row of K
  const uint16_t* gV;  // likewise of V
};

}  // namespace flashvar::sm80::attention
