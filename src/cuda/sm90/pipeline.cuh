// What producers and consumers share: the rings of buffers, their barriers, and the order of tiles.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "core/divisor.h"
#include "core/mask.cuh"
#include "core/problem.h"
#include "ptx/mbarrier.cuh"
#include "ptx/vectors.cuh"
#include "sm90/config.cuh"

namespace flashvar::sm90 {

struct AttentionFwdArguments {
  AttentionFwdProblem problem;
  CUtensorMap q, k, v;
  uint32_t items;      // tiles of kBlockQ query rows, or pairs of them, over all heads and batches
  uint32_t row_items;  // of one head: of one sequence, or of all where they are packed
  bool paired;
  Divisor by_row_items, by_heads_q, by_group;
  uint32_t* next_item;  // 0 at the start: how many items were asked for; null: they are dealt out
};

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Which buffer of a ring, and the parity of the phase that fills it: one register for both.
template <int kStages>
struct PipelineState {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return count / kStages % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};

inline constexpr uint32_t kTurnSlots = 2;

// Shared memory of a block: barriers and turns, then tiles of whole 1024-byte swizzle periods.
template <class Config>
struct Smem {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base + Config::kBarrierBytes; }
  __device__ __forceinline__ uint32_t k(uint32_t stage) const {
    return q() + Config::kBytesQ + stage * Config::kBytesK;
  }
  __device__ __forceinline__ uint32_t v(uint32_t stage) const {
    return k(Config::kStages) + stage * Config::kBytesV;
  }

  // full: the tile has arrived; empty: all consumers are done with it.
  __device__ __forceinline__ uint32_t full_q() const { return base; }
  __device__ __forceinline__ uint32_t empty_q() const { return base + 8; }
  __device__ __forceinline__ uint32_t full_k(uint32_t stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t empty_k(uint32_t stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t full_v(uint32_t stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t empty_v(uint32_t stage) const { return ring(3, stage); }
  // full: the turn is written; empty: all consumers have read it.
  __device__ __forceinline__ uint32_t full_turn(uint32_t slot) const {
    return base + Config::kBarrierBytes / 2 + slot * 16;
  }
  __device__ __forceinline__ uint32_t empty_turn(uint32_t slot) const {
    return full_turn(slot) + 8;
  }
  __device__ __forceinline__ uint32_t turn(uint32_t slot) const {
    return full_turn(kTurnSlots) + slot * 4;
  }

 private:
  __device__ __forceinline__ uint32_t ring(int which, uint32_t stage) const {
    return base + 16 + (which * Config::kStages + stage) * 8;
  }
};

// What a block does one after the other. Under a causal mask an item is two tiles of one head, the
// n-th from the end and the n-th from the start: so all items are equally long, and blocks that run
// at the same time read the same keys. Packed sequences' items are as long as they are: blocks ask
// for the next when they are done with one.
struct Turn {
  uint32_t item;
  bool second;

  __device__ __forceinline__ bool exists() const { return item != kNone; }

  // One warp, the producer's: passes the turn numbered `number` on to the consumers.
  template <class Config>
  __device__ __forceinline__ void pass_on(const Smem<Config>& smem, uint32_t number) const {
    PipelineState<kTurnSlots> const slot{number};
    ptx::mbarrier_wait(smem.empty_turn(slot.stage()), slot.phase() ^ 1);
    if (threadIdx.x % 32 == 0) {
      ptx::shared_store(smem.turn(slot.stage()), exists() ? item * 2 + (second ? 1 : 0) : kNone);
      ptx::mbarrier_arrive(smem.full_turn(slot.stage()));
    }
  }

  template <class Config>
  __device__ __forceinline__ static Turn receive(const Smem<Config>& smem, uint32_t number) {
    PipelineState<kTurnSlots> const slot{number};
    ptx::mbarrier_wait(smem.full_turn(slot.stage()), slot.phase());
    // The same for all lanes, and shown to be: what follows from it stays in uniform registers.
    uint32_t const word = __shfl_sync(0xffffffffu, ptx::shared_load(smem.turn(slot.stage())), 0);
    ptx::mbarrier_arrive(smem.empty_turn(slot.stage()));
    return word == kNone ? Turn{kNone, false} : Turn{word / 2, word % 2 != 0};
  }

  static constexpr uint32_t kNone = 0xffffffffu;
};

// The producer's: which turns a block takes.
struct TurnOrder {
  Turn turn{blockIdx.x, false};
  uint32_t ticket = 0;  // lane 0's

  __device__ __forceinline__ explicit TurnOrder(const AttentionFwdArguments& arguments) {
    end_after(arguments);
  }

  // Asks for the next early: the answer takes as long as several accesses to memory.
  __device__ __forceinline__ void ask(const AttentionFwdArguments& arguments) {
    if (arguments.next_item != nullptr && threadIdx.x % 32 == 0) {
      ticket = atomicAdd(arguments.next_item, 1);
    }
  }

  __device__ __forceinline__ void advance(const AttentionFwdArguments& arguments) {
    if (arguments.next_item != nullptr) {
      turn.item = gridDim.x + __shfl_sync(0xffffffffu, ticket, 0);
    } else {
      turn.second = arguments.paired && !turn.second;
      if (!turn.second) turn.item += gridDim.x;
    }
    end_after(arguments);
  }

 private:
  __device__ __forceinline__ void end_after(const AttentionFwdArguments& arguments) {
    if (turn.item >= arguments.items) turn.item = Turn::kNone;
  }
};

// One tile of queries of one head, and the blocks of keys that they see.
template <class Config>
struct Tile {
  Mask mask;
  uint32_t batch, head, head_kv;
  int32_t first_query;   // within the sequence
  int32_t row_q, row_k;  // of the tensor, where the sequence begins
  int32_t begin, end;    // blocks of keys

  __device__ __forceinline__ Tile(const AttentionFwdArguments& arguments, const Turn& turn) {
    const AttentionFwdProblem& problem = arguments.problem;
    uint32_t const row = arguments.by_row_items(turn.item);
    uint32_t place = turn.item - row * arguments.row_items;
    if (problem.queries.offsets == nullptr) {
      // The last queries first: under a causal mask they have the most to do.
      uint32_t const blocks = (problem.queries.seqlen + Config::kBlockQ - 1) / Config::kBlockQ;
      if (!turn.second) place = blocks - 1 - place;
      batch = arguments.by_heads_q(row);
      head = row - batch * problem.heads_q;
      first_query = place * Config::kBlockQ;
      // The middle of an odd number of tiles is no pair.
      if (turn.second && place == blocks - 1 - place) first_query = problem.queries.seqlen;
    } else {
      TilePosition const position = problem.queries.find(
          arguments.row_items - 1 - place, static_cast<uint32_t>(problem.batch), Config::kBlockQ);
      batch = position.batch;
      head = row;
      first_query = position.first;
    }
    head_kv = arguments.by_group(head);
    Span const queries = problem.queries.span(batch), keys = problem.keys.span(batch);
    row_q = queries.first;
    row_k = keys.first;
    int32_t count_k = keys.count;
    if (problem.seqused_k != nullptr) count_k = min(max(problem.seqused_k[batch], 0), count_k);
    mask = {queries.count, count_k, problem.window_left, problem.window_right};
    int32_t const last = min(first_query + Config::kBlockQ, mask.seqlen_q) - 1;
    begin = mask.visible_begin(first_query) / Config::kBlockKV;
    end = (mask.visible_end(last) + Config::kBlockKV - 1) / Config::kBlockKV;
  }

  // Where the blocks end that a warpgroup's rows see: no earlier than after the first, and there
  // where it has no rows.
  __device__ __forceinline__ int32_t end_of(uint32_t warpgroup) const {
    int32_t const first = first_query + static_cast<int32_t>(warpgroup) * 64;
    int32_t const own = (mask.visible_end(first + 63) + Config::kBlockKV - 1) / Config::kBlockKV;
    return max(first < mask.seqlen_q ? min(own, end) : begin, begin + 1);
  }

  // Whether the tile has rows at all; and whether these see any key.
  __device__ __forceinline__ bool exists() const { return first_query < mask.seqlen_q; }
  __device__ __forceinline__ bool sees() const { return begin < end; }
};

}  // namespace flashvar::sm90
