// What a block of the backward computes, and where its intermediate results lie in the workspace.
#pragma once
#include <cstdint>

#include "core/mask.cuh"
#include "core/problem.h"
#include "ptx/special_registers.cuh"

namespace flashvar::sm80 {

// The problem and the parts of its workspace. Rows of queries are padded to whole tiles there, per
// sequence: a tile is read and added to without looking where the sequence ends.
struct AttentionBwdArguments : AttentionBwdProblem {
  float* lse_log2;    // [heads_q, padded rows]: lse * log2(e); +inf where a row has no weights
  float* row_sums;    // [heads_q, padded rows]: D, the sum over the row of dO O, less dLSE
  float* grad_q_sum;  // [heads_q, query tiles, tile]; null in deterministic mode
  float* grad_k_sum;  // [heads_kv, key tiles, tile]; null where one block sees all heads of a group
  float* grad_v_sum;
  int64_t query_tiles, key_tiles;
  int32_t splits;    // blocks that share the query heads of a group
  bool aligned;      // every row of every tensor starts on 16 bytes
  bool shared_bias;  // several scores add to one element of grad_bias
};

// A tile of kRows x kCols as the warps of a block hold it in mma accumulators: kRowWarps x
// kColWarps warps, which take turns at groups of 16 columns.
template <int kRows_, int kCols_, int kRowWarps_, int kColWarps_>
struct GradTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kColWarps = kColWarps_;
  static constexpr int kWarps = kRowWarps * kColWarps;
  static constexpr int kWarpRows = kRows / kRowWarps;
  static constexpr int kMmaRows = kWarpRows / 16;
  static constexpr int kMmaCols = kCols / kColWarps / 8;
  static constexpr int kElements = kRows * kCols;

  // Column of mma tile n of a warp.
  static __device__ __forceinline__ int column(int warp, int n) {
    return (warp / kRowWarps + kColWarps * (n / 2)) * 16 + n % 2 * 8;
  }
  static __device__ __forceinline__ int row(int warp) { return warp % kRowWarps * kWarpRows; }

  // In the workspace a tile is stored register by register, the lanes of a warp side by side.
  static __device__ __forceinline__ int place(int warp, int lane) {
    return warp * kMmaRows * kMmaCols * 4 * 32 + lane;
  }
  static __device__ __forceinline__ constexpr int step(int m, int n, int e) {
    return ((m * kMmaCols + n) * 4 + e) * 32;
  }
};

// Which keys of which heads a block owns.
struct KeyBlock {
  uint32_t batch, head_kv;
  int32_t first_head, heads;  // query heads that it walks
  int32_t first_key;          // in its sequence; at the end or past it when there is nothing to do
  int32_t key_rows;           // of the sequence, used or not
  Span queries, keys;         // of the sequence; keys that are used
  int64_t first_query_tile;   // of the sequence
  int64_t key_tile;

  __device__ __forceinline__ KeyBlock(const AttentionBwdArguments& args, int32_t block_q,
                                      int32_t block_kv) {
    uint32_t block = ptx::block_index();
    uint32_t const batches = static_cast<uint32_t>(args.batch);
    uint32_t const heads_kv = args.heads_q / args.group;
    uint32_t split;
    if (args.keys.offsets == nullptr) {
      // The first keys first: under a causal mask they have the most to do.
      uint32_t const blocks_kv = (args.keys.seqlen + block_kv - 1) / block_kv;
      first_key = block % blocks_kv * block_kv;
      block /= blocks_kv;
      split = block % args.splits;
      block /= args.splits;
      head_kv = block % heads_kv;
      batch = block / heads_kv;
    } else {
      uint32_t const tiles = static_cast<uint32_t>(args.key_tiles);
      TilePosition const tile = args.keys.find(block % tiles, batches, block_kv);
      batch = tile.batch;
      first_key = tile.first;
      block /= tiles;
      split = block % args.splits;
      head_kv = block / args.splits;
    }
    int32_t const begin = args.group * split / args.splits;
    first_head = head_kv * args.group + begin;
    heads = args.group * (split + 1) / args.splits - begin;
    queries = args.queries.span(batch);
    keys = args.keys.span(batch);
    key_rows = keys.count;
    if (args.seqused_k != nullptr) keys.count = min(max(args.seqused_k[batch], 0), keys.count);
    first_query_tile = args.queries.first_tile(batch, block_q);
    key_tile = args.keys.first_tile(batch, block_kv) + first_key / block_kv;
  }

  __device__ __forceinline__ Mask mask(const AttentionProblem& problem) const {
    return {queries.count, keys.count, problem.window_left, problem.window_right};
  }

  // Of a row of the sequence in a tensor of queries.
  __device__ __forceinline__ int64_t query_offset(const TensorView& tensor, int32_t head,
                                                  int32_t row) const {
    return batch * tensor.batch_stride + head * tensor.head_stride +
           int64_t{queries.first + row} * tensor.seq_stride;
  }

  // Of the block's first row in a tensor of keys or values.
  __device__ __forceinline__ int64_t key_offset(const TensorView& tensor) const {
    return batch * tensor.batch_stride + head_kv * tensor.head_stride +
           int64_t{keys.first + first_key} * tensor.seq_stride;
  }
};

}  // namespace flashvar::sm80
