// The dK and dV kernel's arguments, and its key tiles of dense sequences (varlen: bwd_varlen.cuh).
#pragma once
#include <cuda.h>

#include <cstdint>

#include "attention/mask.cuh"
#include "attention/problem.h"
#include "ptx/bulk.cuh"
#include "sm90/attention/bwd_config.cuh"
#include "sm90/attention/smem.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// The tail of a schedule of pairs (KeyWork): the key tiles that CTAs take one by one, after the
// rounds in which they take pairs. A row is the key tiles of one kv head of one sequence. The tail
// has all tiles of the last `rows` rows, which are those from first_row on. Where the pairs end
// within a row (pairs > 0), that row is first_row - 1: its first and its last `pairs` tiles were
// taken as pairs, and the tail also has the tiles between them. Tiles of the tail are numbered by
// position in the row, and by row where positions are equal: under a causal mask, tiles with the
// most work come first.
struct KeyTileTail {
  uint32_t first_row, rows;
  uint32_t pairs;
  uint32_t count;  // tiles of the tail

  // `units`: pairs before the tail. Host only.
  static KeyTileTail make(uint32_t units, uint32_t all_rows, uint32_t tiles_per_row) {
    uint32_t const pairs_per_row = (tiles_per_row + 1) / 2;
    KeyTileTail tail{};
    tail.pairs = units % pairs_per_row;
    tail.first_row = (units + pairs_per_row - 1) / pairs_per_row;
    tail.rows = all_rows - tail.first_row;
    tail.count = tail.rows * tiles_per_row + (tail.pairs > 0 ? tiles_per_row - 2 * tail.pairs : 0);
    return tail;
  }

  // A part of the positions in a row: the first `pairs`, those between, or the last `pairs`. At
  // every position of a part, the same rows have a tile in the tail: `width` rows from `row` on.
  // `block`: the part's first position. `number`: number of a tile within the part.
  struct Part {
    uint32_t number, width, row, block;
  };
  __device__ __forceinline__ Part find(uint32_t number, uint32_t tiles_per_row) const {
    uint32_t const partial = pairs > 0 ? 1 : 0, ends = pairs * rows;
    if (number < ends) return {number, rows, first_row, 0};
    number -= ends;
    uint32_t const middle = (tiles_per_row - 2 * pairs) * (rows + partial);
    if (number < middle) return {number, rows + partial, first_row - partial, pairs};
    return {number - middle, rows, first_row, tiles_per_row - pairs};
  }
};

// Arguments of the dK and dV kernel. In the workspace the queries of each sequence are padded to
// whole tiles.
struct BwdArgs {
  BwdProblem problem;
  CUtensorMap q, k, v, grad_out;
  const float* lse_log2;  // [heads_q, query_tiles, kBlockQ], from the preprocess kernel
  const float* delta;     // [heads_q, query_tiles, kBlockQ], likewise
  // fp32 sums of dQ, [heads_q, query_tiles, warpgroup, kGradQElements] in accumulator order; or
  // null.
  float* grad_q_sum;
  int32_t query_tiles;      // per head, over all batches
  uint32_t work_units;      // over all heads and batches
  uint32_t units_per_head;  // dense: of one head and sequence; varlen: of one head, all sequences
  bool paired;              // a unit is a pair of tiles
  // Dense, where units are pairs: rounds in which each CTA takes one, and the tiles of the rest.
  uint32_t pair_rounds;
  KeyTileTail tail;
  bool heads_outermost;  // varlen: all steps of a head come before those of the next
  // Dynamic schedules: [0] the next unit of this kernel (varlen), [1] of the dQ kernel.
  uint32_t* counters;
};

// Static schedule of dense sequences: a CTA takes every gridDim.x-th unit. A unit is one tile or,
// under a causal mask, a pair of tiles of one head, the n-th from the start and the n-th from the
// end (as in scheduler.cuh). Where some CTAs would have no pair in the last round, the tiles of the
// last two rounds (KeyTileTail) are taken one by one, those with the most work first, by the CTAs
// in ascending order, then in descending order, and so on. No CTA has then much more work than the
// mean.
struct KeyWork {
  uint32_t taken = 0;  // tiles of this CTA before this one

  __device__ __forceinline__ bool in_tail(const BwdArgs& args) const {
    return args.paired && taken >= 2 * args.pair_rounds;
  }
  // Whether this is the second tile of a pair; in the tail every second tile is.
  __device__ __forceinline__ bool second(const BwdArgs& args) const {
    return args.paired && taken % 2 != 0;
  }
  __device__ __forceinline__ uint32_t unit(const BwdArgs& args) const {
    return blockIdx.x + (args.paired ? taken / 2 : taken) * gridDim.x;
  }
  // Number of a tile of the tail.
  __device__ __forceinline__ uint32_t tail_tile(const BwdArgs& args) const {
    uint32_t const round = taken - 2 * args.pair_rounds;
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
  __device__ __forceinline__ bool exists(const BwdArgs& args) const {
    return in_tail(args) ? tail_tile(args) < args.tail.count : unit(args) < args.work_units;
  }
};

// KeyTile: one key tile of one kv head, and the query blocks to which it is visible.
template <class Config>
struct KeyTile {
  Mask mask;
  uint32_t batch, head_kv;
  int32_t first_key;
  int32_t begin, end;  // query blocks
  bool second;         // the second tile of a pair

  __device__ __forceinline__ KeyTile(const BwdArgs& args, const KeyWork& work)
      : second(work.second(args)) {
    const BwdProblem& problem = args.problem;
    uint32_t const heads_kv = problem.heads_q / problem.group;
    int32_t const count_k = problem.keys.seqlen;
    uint32_t const blocks = (count_k + Config::kBlockKV - 1) / Config::kBlockKV;
    bool const in_tail = work.in_tail(args);
    KeyTileTail::Part part{work.unit(args), args.units_per_head, 0, 0};
    if (in_tail) part = args.tail.find(work.tail_tile(args), blocks);
    uint32_t const quotient = part.number / part.width, rest = part.number % part.width;
    uint32_t const row = in_tail ? part.row + rest : quotient;
    uint32_t block = in_tail ? part.block + quotient : rest;
    // The middle one of an odd number of tiles has no partner: no second tile.
    bool const exists = in_tail || !second || 2 * block + 1 != blocks;
    if (!in_tail && second) block = blocks - 1 - block;
    batch = row / heads_kv;
    head_kv = row % heads_kv;
    first_key = exists ? block * Config::kBlockKV : count_k;
    mask = {problem.queries.seqlen, count_k, problem.window_left, problem.window_right};
    int32_t const last = min(first_key + Config::kBlockKV, count_k) - 1;
    begin = mask.query_begin(first_key) / Config::kBlockQ;
    end = (mask.query_end(last) + Config::kBlockQ - 1) / Config::kBlockQ;
  }

  // Whether query blocks are visited from the last to the first (query_iterator.cuh).
  __device__ __forceinline__ bool reversed() const { return !second; }
  __device__ __forceinline__ static constexpr bool heads_outermost(const BwdArgs&) { return false; }

  // False for the second tile of a unit that has only one.
  __device__ __forceinline__ bool exists() const { return first_key < mask.seqlen_k; }
  // Whether the tile is visible to any query; otherwise dK and dV are zeros.
  __device__ __forceinline__ bool has_queries() const { return begin < end; }

  // The rows of dK and dV that exist.
  __device__ __forceinline__ Span rows() const { return {0, mask.seqlen_k}; }

  // Number of a query tile in the workspace. Precondition: it fits 32 bits (the launcher checks).
  __device__ __forceinline__ uint32_t query_tile(const BwdArgs& args, uint32_t head,
                                                 uint32_t m) const {
    uint32_t const tiles = (mask.seqlen_q + Config::kBlockQ - 1) / Config::kBlockQ;
    return head * args.query_tiles + batch * tiles + m;
  }
};

// Loads LSE and delta of a query tile (`tile`: query_tile()) into a stage. Completes on the
// mbarrier of the stage's dO, which must expect the bytes.
template <class Config>
__device__ __forceinline__ void load_row_values(const BwdArgs& args,
                                                const KeyTileSmem<Config>& smem, uint32_t stage,
                                                uint32_t tile) {
  int64_t const padded = int64_t{tile} * Config::kBlockQ;
  ptx::bulk_load(smem.lse(stage), args.lse_log2 + padded, Config::kRowBytes,
                 smem.full_grad_out(stage));
  ptx::bulk_load(smem.delta(stage), args.delta + padded, Config::kRowBytes,
                 smem.full_grad_out(stage));
}

}  // namespace flashvar::sm90::attention
