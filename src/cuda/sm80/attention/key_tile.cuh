// The key tile that a block of the backward owns, and the arguments of the backward's kernels.
#pragma once
#include <cstdint>

#include "attention/mask.cuh"
#include "attention/problem.h"
#include "core/ceil_div.h"
#include "ptx/special_registers.cuh"
#include "sm80/attention/query_tile.cuh"

namespace flashvar::sm80::attention {

// The problem and pointers to the parts of its workspace. There the queries of each sequence are
// padded to whole tiles ("padded rows"), so that tiles are read and added to without bounds checks.
struct BwdArgs : BwdProblem {
  float* lse_log2;                 // [heads_q, padded rows], from the preprocess kernel
  float* delta;                    // [heads_q, padded rows], likewise
  float* grad_q_sum;               // [heads_q, query_tiles, tile]; null: dQ is not summed
  float* grad_k_sum;               // [heads_kv, key_tiles, tile]; null if nothing is divided
  float* grad_v_sum;               // likewise
  int64_t query_tiles, key_tiles;  // per head, over all batches
  int32_t head_parts;              // number of blocks that share the query heads of a group
  int32_t query_parts;             // and of blocks that share the query blocks of a head
  bool one_key_tile;               // of each sequence: its blocks store dQ
  bool aligned;                    // every row of every tensor starts at a multiple of 16 bytes
  bool shared_bias;  // the bias is broadcast: several scores add to one element of grad_bias
};

// Key tile of this block: keys of one kv head, and the query heads and blocks over which it sums
// their gradients.
struct KeyTile {
  uint32_t batch, head_kv;
  int32_t first_head, heads;  // query heads [first_head, first_head + heads)
  int32_t query_part;         // which of the query_parts parts of its query blocks
  int32_t first_key;          // within its sequence; past its end: the block has no work
  int32_t key_rows;           // keys of the sequence, in use or not
  Span queries, keys;         // of the sequence; keys: the keys in use
  int64_t first_query_tile;   // number of the sequence's first query tile in the workspace
  int64_t key_tile;           // number of this tile in the workspace

  __device__ __forceinline__ KeyTile(const BwdArgs& args, int32_t block_q, int32_t block_kv) {
    uint32_t const parts = static_cast<uint32_t>(args.query_parts);
    uint32_t block = ptx::block_index() / parts;
    query_part = static_cast<int32_t>(ptx::block_index() % parts);
    uint32_t const batches = static_cast<uint32_t>(args.batch);
    uint32_t const heads_kv = args.heads_q / args.group;
    uint32_t head_part;
    if (args.keys.offsets == nullptr) {
      // The first keys come first: under a causal mask they have the most work.
      uint32_t const blocks_kv = ceil_div(args.keys.seqlen, block_kv);
      first_key = block % blocks_kv * block_kv;
      block /= blocks_kv;
      head_part = block % args.head_parts;
      block /= args.head_parts;
      head_kv = block % heads_kv;
      batch = block / heads_kv;
    } else {
      uint32_t const tiles = static_cast<uint32_t>(args.key_tiles);
      TileCoordinate const tile = args.keys.find(block % tiles, batches, block_kv);
      batch = tile.batch;
      first_key = tile.first;
      block /= tiles;
      head_part = block % args.head_parts;
      head_kv = block / args.head_parts;
    }
    int32_t const begin = args.group * head_part / args.head_parts;
    first_head = head_kv * args.group + begin;
    heads = args.group * (head_part + 1) / args.head_parts - begin;
    queries = args.queries.span(batch);
    keys = args.keys_in_use(batch);
    key_rows = args.keys.span(batch).count;
    first_query_tile = args.queries.first_tile(batch, block_q);
    key_tile = args.keys.first_tile(batch, block_kv) + first_key / block_kv;
  }

  __device__ __forceinline__ Mask mask(const Problem& problem) const {
    return {queries.count, keys.count, problem.window_left, problem.window_right};
  }

  // Offset of the sequence's row `row` in a tensor with query rows.
  __device__ __forceinline__ int64_t query_offset(const Tensor& tensor, int32_t head,
                                                  int32_t row) const {
    return batch * tensor.batch_stride + head * tensor.head_stride +
           int64_t{queries.first + row} * tensor.seq_stride;
  }

  // Offset of the tile's first row in a tensor with key rows.
  __device__ __forceinline__ int64_t key_offset(const Tensor& tensor) const {
    return batch * tensor.batch_stride + head_kv * tensor.head_stride +
           int64_t{keys.first + first_key} * tensor.seq_stride;
  }
};

}  // namespace flashvar::sm80::attention
