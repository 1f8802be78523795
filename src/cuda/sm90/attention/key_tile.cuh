// The dK and dV kernel's arguments, and its key tiles with a static schedule (dynamic:
// bwd_dynamic.cuh).
#pragma once
#include <cuda.h>

#include <cstdint>

#include "attention/mask.cuh"
#include "attention/problem.h"
#include "core/ceil_div.h"
#include "ptx/bulk.cuh"
#include "sm90/attention/bwd_config.cuh"
#include "sm90/attention/key_tile_splits.h"
#include "sm90/attention/pair_schedule.cuh"
#include "sm90/attention/smem.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// Arguments of the dK and dV kernel. In the workspace the queries of each sequence are padded to
// whole tiles.
struct BwdArgs {
  BwdProblem problem;  // of the dK and dV kernel: its group is that of a split head
  KeyTileSplits splits;
  CUtensorMap q, k, v, grad_out;
  const float* lse_log2;  // [heads_q, query_tiles, kBlockQ], from the preprocess kernel
  const float* delta;     // [heads_q, query_tiles, kBlockQ], likewise
  // fp32 sums of dQ, [heads_q, query_tiles, warpgroup, kGradQElements] in accumulator order; or
  // null.
  float* grad_q_sum;
  bool stores_grad_q;       // key tiles store dQ (bwd_grad_q.cuh)
  int32_t query_tiles;      // per head, over all batches
  uint32_t work_units;      // over all heads and batches
  uint32_t units_per_head;  // dense: of one head and sequence; varlen: of one head, all sequences
  bool paired;              // a unit is a pair of tiles
  PairSchedule pairs;       // dense, where units are pairs
  bool heads_outermost;     // dynamic: all steps of a head come before those of the next
  // Dynamic schedules: [0] the next unit of this kernel, [1] of the dQ kernel.
  uint32_t* counters;

  // Split heads of a sequence.
  __host__ __device__ __forceinline__ uint32_t split_heads() const {
    return problem.heads_q / problem.group * splits.queries;
  }
};

// Static schedule of dense sequences: a CTA takes every gridDim.x-th unit. A unit is one tile or,
// under a causal mask, a pair of tiles (PairSchedule).
struct KeyWork {
  uint32_t taken = 0;  // tiles of this CTA before this one

  __device__ __forceinline__ bool in_tail(const BwdArgs& args) const {
    return args.paired && taken >= 2 * args.pairs.rounds;
  }
  // Whether this is the second tile of a pair. In the tail, which has no pairs, every second tile
  // of the CTA counts as one: that is the order of its query blocks (KeyTile::reversed()).
  __device__ __forceinline__ bool second(const BwdArgs& args) const {
    return args.paired && taken % 2 != 0;
  }
  __device__ __forceinline__ uint32_t unit(const BwdArgs& args) const {
    return blockIdx.x + (args.paired ? taken / 2 : taken) * gridDim.x;
  }
  __device__ __forceinline__ uint32_t tail_tile(const BwdArgs& args) const {
    return args.pairs.tail_tile(taken - 2 * args.pairs.rounds);
  }
  __device__ __forceinline__ bool exists(const BwdArgs& args) const {
    return in_tail(args) ? tail_tile(args) < args.pairs.tail.count : unit(args) < args.work_units;
  }
};

// KeyTile: one key tile of one split head (KeyTileSplits), and the query blocks to which it is
// visible.
template <class Config>
struct KeyTile {
  Mask mask;
  uint32_t batch, split_head;
  int32_t first_key;
  int32_t begin, end;  // query blocks
  bool second;         // the second tile of a pair

  __device__ __forceinline__ KeyTile(const BwdArgs& args, const KeyWork& work)
      : second(work.second(args)) {
    const BwdProblem& problem = args.problem;
    uint32_t const heads = problem.heads_q / problem.group;
    int32_t const count_k = problem.keys.seqlen;
    uint32_t const blocks = ceil_div(count_k, Config::kBlockKV);
    bool const in_tail = work.in_tail(args);
    // One division for both. In the tail it gives a position and a row (PairTail::Part). Before the
    // tail it divides the unit's number by the units of a row, and gives the row and the pair or
    // tile in it.
    PairTail::Part part{work.unit(args), args.units_per_head, 0, 0};
    if (in_tail) part = args.pairs.tail.find(work.tail_tile(args), blocks);
    uint32_t const quotient = part.number / part.width, rest = part.number % part.width;
    uint32_t const row = in_tail ? part.row + rest : quotient;
    uint32_t block = in_tail ? part.block + quotient : rest;
    // The middle one of an odd number of tiles has no partner: its pair has no second tile.
    bool const exists = in_tail || !second || 2 * block + 1 != blocks;
    if (!in_tail && second) block = blocks - 1 - block;
    batch = row / heads;
    split_head = row % heads;
    first_key = exists ? block * Config::kBlockKV : count_k;
    mask = {problem.queries.seqlen, count_k, problem.window_left, problem.window_right};
    int32_t const last = min(first_key + Config::kBlockKV, count_k) - 1;
    begin = mask.query_begin(first_key) / Config::kBlockQ;
    end = ceil_div(mask.query_end(last), Config::kBlockQ);
  }

  // The tile has query heads [n group, (n + 1) group), where n is this index and group that of the
  // arguments. It is the split head, because dense kernels do not divide query blocks.
  __device__ __forceinline__ uint32_t part_of_heads() const { return split_head; }

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
    uint32_t const tiles = ceil_div(mask.seqlen_q, Config::kBlockQ);
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
