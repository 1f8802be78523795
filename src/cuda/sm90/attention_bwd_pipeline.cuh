// What producer and consumers of the backward share: shared memory, its barriers, and the order of
// tiles.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "core/mask.cuh"
#include "core/problem.h"
#include "ptx/bulk.cuh"
#include "sm90/attention_bwd_config.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90 {

// Rows of queries are padded to whole tiles in the workspace.
struct AttentionBwdArguments {
  AttentionBwdProblem problem;
  CUtensorMap q, k, v, grad_out;
  const float* lse_log2;  // [heads_q, query tiles, kBlockQ]: +inf where a row has no weights
  const float* row_sums;  // likewise: D, the sum over the row of dO O, less dLSE
  float* grad_q_sum;      // [heads_q, query tiles, warpgroup's part], in the order of accumulators,
                          // or null
  int32_t query_tiles;    // of one head, over all batches
  uint32_t items;         // tiles of kBlockKV keys, or pairs of them, over all heads and batches
  uint32_t row_items;     // of one head and batch
  bool paired;
  uint32_t* next_item;  // of ragged sequences: the first item that no block has taken
};

inline constexpr uint32_t kTileSlots = 2, kTileBytes = 128;

template <class Config>
struct BwdSmem {
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base + Config::kBarrierBytes; }
  __device__ __forceinline__ uint32_t v() const { return k() + Config::kBytesK; }
  __device__ __forceinline__ uint32_t q(uint32_t stage) const {
    return v() + Config::kBytesV + stage * Config::kBytesQ;
  }
  __device__ __forceinline__ uint32_t grad_out(uint32_t stage) const {
    return q(Config::kStages) + stage * Config::kBytesGradOut;
  }
  // dS: rows are queries, pages of 64 keys.
  __device__ __forceinline__ uint32_t grad_scores(uint32_t stage) const {
    return grad_out(Config::kStages) + stage * Config::kBytesScores;
  }
  // Sharing::kProducts: P in fp32, from the first warpgroup to the second, thread by thread.
  __device__ __forceinline__ uint32_t weights(uint32_t stage) const { return grad_scores(stage); }
  __device__ __forceinline__ uint32_t lse(uint32_t stage) const {
    return grad_scores(Config::kScoreStages) + stage * Config::kRowBytes;
  }
  __device__ __forceinline__ uint32_t row_sums(uint32_t stage) const {
    return lse(Config::kStages) + stage * Config::kRowBytes;
  }

  // full: the tile has arrived; empty: both consumers are done with it. LSE and D come with dO.
  __device__ __forceinline__ uint32_t full_k() const { return base; }
  __device__ __forceinline__ uint32_t full_v() const { return base + 8; }
  __device__ __forceinline__ uint32_t empty_kv() const { return base + 16; }
  // Of dS, or of P, in the buffers between the consumers.
  __device__ __forceinline__ uint32_t full_scores(uint32_t stage) const {
    return ring(4, 0) + stage * 16;
  }
  __device__ __forceinline__ uint32_t empty_scores(uint32_t stage) const {
    return full_scores(stage) + 8;
  }
  // Of ragged sequences: the tile that is next; who is done with it; that the next may be looked
  // for.
  __device__ __forceinline__ uint32_t full_tile(uint32_t slot) const {
    return base + Config::kBarrierBytes / 2 + slot * 16;
  }
  __device__ __forceinline__ uint32_t empty_tile(uint32_t slot) const {
    return full_tile(slot) + 8;
  }
  __device__ __forceinline__ uint32_t want_tile() const { return full_tile(kTileSlots); }
  __device__ __forceinline__ uint32_t tile(uint32_t slot) const {
    return want_tile() + 16 + slot * kTileBytes;
  }
  __device__ __forceinline__ uint32_t full_q(uint32_t stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t empty_q(uint32_t stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t full_grad_out(uint32_t stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t empty_grad_out(uint32_t stage) const {
    return ring(3, stage);
  }

 private:
  __device__ __forceinline__ uint32_t ring(int which, uint32_t stage) const {
    return base + 32 + (which * Config::kStages + stage) * 8;
  }
};

// What a block does one after the other, as in the forward: under a mask an item is two tiles of
// one head, the n-th from the start and the n-th from the end.
struct BwdTurn {
  uint32_t item;
  bool second;

  __device__ __forceinline__ explicit BwdTurn() : item(blockIdx.x), second(false) {}

  __device__ __forceinline__ void advance(const AttentionBwdArguments& arguments) {
    second = arguments.paired && !second;
    if (!second) item += gridDim.x;
  }
};

// One tile of keys of one head, and the blocks of queries that see them.
template <class Config>
struct KeyTile {
  Mask mask;
  uint32_t batch, head_kv;
  int32_t first_key;
  int32_t begin, end;  // blocks of queries
  bool second;         // of a pair

  __device__ __forceinline__ KeyTile(const AttentionBwdArguments& arguments, const BwdTurn& turn)
      : second(turn.second) {
    const AttentionBwdProblem& problem = arguments.problem;
    uint32_t const heads_kv = problem.heads_q / problem.group;
    uint32_t const row = turn.item / arguments.row_items;
    uint32_t const place = turn.item % arguments.row_items;
    int32_t const count_k = problem.keys.seqlen;
    uint32_t const blocks = (count_k + Config::kBlockKV - 1) / Config::kBlockKV;
    uint32_t const block = turn.second ? blocks - 1 - place : place;
    batch = row / heads_kv;
    head_kv = row % heads_kv;
    first_key = block * Config::kBlockKV;
    // The middle of an odd number of tiles is no pair.
    if (turn.second && block == place) first_key = count_k;
    mask = {problem.queries.seqlen, count_k, problem.window_left, problem.window_right};
    int32_t const last = min(first_key + Config::kBlockKV, count_k) - 1;
    begin = mask.seeing_begin(first_key) / Config::kBlockQ;
    end = (mask.seeing_end(last) + Config::kBlockQ - 1) / Config::kBlockQ;
  }

  __device__ __forceinline__ bool reversed() const { return !second; }

  __device__ __forceinline__ bool exists() const { return first_key < mask.seqlen_k; }
  __device__ __forceinline__ bool seen() const { return begin < end; }

  // Of gradients.
  __device__ __forceinline__ Span rows() const { return {0, mask.seqlen_k}; }

  // Number of a tile of queries in the workspace; the launcher has seen to it that it fits.
  __device__ __forceinline__ uint32_t query_tile(const AttentionBwdArguments& arguments,
                                                 uint32_t head, uint32_t m) const {
    uint32_t const tiles = (mask.seqlen_q + Config::kBlockQ - 1) / Config::kBlockQ;
    return head * arguments.query_tiles + batch * tiles + m;
  }
};

// Starts the copies of LSE and D of the queries of KeyTile::query_tile() into a stage, which come
// with its dO; the caller has announced the bytes.
template <class Config>
__device__ __forceinline__ void load_row_values(const AttentionBwdArguments& arguments,
                                                const BwdSmem<Config>& smem, uint32_t stage,
                                                uint32_t tile) {
  int64_t const padded = int64_t{tile} * Config::kBlockQ;
  ptx::bulk_load(smem.lse(stage), arguments.lse_log2 + padded, Config::kRowBytes,
                 smem.full_grad_out(stage));
  ptx::bulk_load(smem.row_sums(stage), arguments.row_sums + padded, Config::kRowBytes,
                 smem.full_grad_out(stage));
}

// Calls step(head, m) for the blocks of queries that see a tile, of all heads of its group. Heads
// are innermost, and the queries of tiles that start together are reversed, those of tiles that end
// together not: so blocks with the same keys' heads are at the same queries whatever their masks,
// and find them, and the sums of dQ, in the L2 cache.
template <class Tile, class Step>
__device__ __forceinline__ void for_each_step(const Tile& tile, int32_t group, Step&& step) {
  uint32_t head = tile.head_kv * group;
  int32_t m = tile.reversed() ? tile.end - 1 : tile.begin;
#pragma unroll 1
  for (int32_t left = group * (tile.end - tile.begin); left > 0; --left) {
    step(head, m);
    if (++head == (tile.head_kv + 1) * group) {
      head -= group;
      m += tile.reversed() ? -1 : 1;
    }
  }
}

}  // namespace flashvar::sm90
