// Tiles of keys where lengths are known to the device alone: packed sequences, and keys that are
// used up to a length.
//
// Such tiles are unequally long, and finding one takes several dependent accesses to memory. So
// blocks take them from a counter, and one warp of the producer finds them ahead of the others, who
// read them from shared memory.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/attention_bwd_pipeline.cuh"

namespace flashvar::sm90 {

// Where a box of rows is in a ragged map: see TensorMapMaker.
struct RaggedPlace {
  int32_t row, end;
  uint32_t batch;

  // Of row `row` of a sequence; `span`: the rows that may be seen.
  __device__ __forceinline__ RaggedPlace(const Sequences& sequences, const Span& span,
                                         uint32_t batch, int32_t row)
      : row((sequences.offsets == nullptr ? sequences.seqlen : sequences.total) - span.count + row),
        end(span.first + span.count),
        batch(sequences.offsets == nullptr ? batch : 0) {}
};

// KeyTile of a ragged sequence, as it lies in shared memory.
template <class Config>
struct RaggedKeyTile {
  Mask mask;  // of the keys that are used
  uint32_t batch, head_kv;
  int32_t first_key;   // within the sequence; negative: there are no more tiles
  int32_t begin, end;  // blocks of queries
  Span all;            // keys of the sequence, used or not
  int32_t first_query_tile;
  uint32_t seen_before;       // the block's tiles before this that are seen
  RaggedPlace queries, keys;  // of the sequence and of the tile

  __device__ __forceinline__ void fill(const AttentionBwdProblem& problem,
                                       const TilePosition& position, uint32_t head, Span span_k) {
    batch = position.batch;
    head_kv = head;
    first_key = position.first;
    all = span_k;
    int32_t used = all.count;
    if (problem.seqused_k != nullptr) used = min(max(problem.seqused_k[batch], 0), used);
    keys = RaggedPlace(problem.keys, {all.first, used}, batch, first_key);
    Span const span = problem.queries.span(batch);
    queries = RaggedPlace(problem.queries, span, batch, 0);
    first_query_tile = static_cast<int32_t>(problem.queries.first_tile(batch, Config::kBlockQ));
    mask = {span.count, used, problem.window_left, problem.window_right};
    begin = end = 0;
    if (first_key >= used) return;
    int32_t const last = min(first_key + Config::kBlockKV, used) - 1;
    begin = mask.seeing_begin(first_key) / Config::kBlockQ;
    end = (mask.seeing_end(last) + Config::kBlockQ - 1) / Config::kBlockQ;
  }

  // Last queries first: then the first keys, which have most to do, may start first.
  __device__ __forceinline__ static constexpr bool reversed() { return true; }

  __device__ __forceinline__ static constexpr bool exists() { return true; }
  __device__ __forceinline__ bool seen() const { return begin < end; }

  __device__ __forceinline__ Span rows() const { return all; }

  __device__ __forceinline__ uint32_t query_tile(const AttentionBwdArguments& arguments,
                                                 uint32_t head, uint32_t m) const {
    return head * arguments.query_tiles + first_query_tile + m;
  }
};

template <class Config>
__device__ __forceinline__ RaggedKeyTile<Config>& shared_tile(const BwdSmem<Config>& smem,
                                                              uint32_t slot) {
  static_assert(sizeof(RaggedKeyTile<Config>) <= kTileBytes);
  return *static_cast<RaggedKeyTile<Config>*>(__cvta_shared_to_generic(smem.tile(slot)));
}

// One warp: finds the block's tiles that have rows, and says when there are no more.
template <class Config>
__device__ __forceinline__ void find_tiles(const AttentionBwdArguments& arguments,
                                           const BwdSmem<Config>& smem) {
  const AttentionBwdProblem& problem = arguments.problem;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<kTileSlots> slot;
  uint32_t seen = 0;
  auto await_slot = [&] { ptx::mbarrier_wait(smem.empty_tile(slot.stage()), slot.phase() ^ 1); };
  auto take_item = [&] {
    uint32_t item = 0;
    if (first_lane) item = atomicAdd(arguments.next_item, 1);
    return __shfl_sync(0xffffffffu, item, 0);
  };
  for (uint32_t item = take_item(); item < arguments.items; item = take_item()) {
    TilePosition position;
    uint32_t head_kv = item / arguments.row_items;
    uint32_t const place = item % arguments.row_items;
    if (problem.keys.offsets == nullptr) {
      uint32_t const heads_kv = problem.heads_q / problem.group;
      position = {head_kv / heads_kv, static_cast<int32_t>(place * Config::kBlockKV)};
      head_kv %= heads_kv;
    } else {
      position = problem.keys.find(place, static_cast<uint32_t>(problem.batch), Config::kBlockKV);
    }
    Span const keys = problem.keys.span(position.batch);
    bool const exists = position.first < keys.count;
    if (exists && first_lane) {
      await_slot();
      RaggedKeyTile<Config>& tile = shared_tile(smem, slot.stage());
      tile.fill(problem, position, head_kv, keys);
      tile.seen_before = seen;
      seen += tile.seen() ? 1 : 0;
      ptx::mbarrier_arrive(smem.full_tile(slot.stage()));
    }
    __syncwarp();
    if (!exists) continue;
    // Taken earlier, the next item might be one that another block would start sooner.
    ptx::mbarrier_wait(smem.want_tile(), PipelineState<1>{slot.count}.phase());
    slot.advance();
  }
  if (!first_lane) return;
  await_slot();
  shared_tile(smem, slot.stage()).first_key = -1;
  ptx::mbarrier_arrive(smem.full_tile(slot.stage()));
}

// A block's tiles one after the other; each thread says for itself when it has read one.
template <class Config>
struct RaggedWalk {
  PipelineState<kTileSlots> slot;

  __device__ __forceinline__ bool left(const AttentionBwdArguments&, const BwdSmem<Config>& smem) {
    ptx::mbarrier_wait(smem.full_tile(slot.stage()), slot.phase());
    return shared_tile(smem, slot.stage()).first_key >= 0;
  }
  __device__ __forceinline__ const RaggedKeyTile<Config>& tile(const AttentionBwdArguments&,
                                                               const BwdSmem<Config>& smem) const {
    return shared_tile(smem, slot.stage());
  }
  __device__ __forceinline__ void advance(const AttentionBwdArguments&,
                                          const BwdSmem<Config>& smem) {
    ptx::mbarrier_arrive(smem.empty_tile(slot.stage()));
    slot.advance();
  }
};

template <class Config>
struct DenseWalk {
  BwdTurn turn;

  __device__ __forceinline__ bool left(const AttentionBwdArguments& arguments,
                                       const BwdSmem<Config>&) const {
    return turn.item < arguments.items;
  }
  __device__ __forceinline__ KeyTile<Config> tile(const AttentionBwdArguments& arguments,
                                                  const BwdSmem<Config>&) const {
    return KeyTile<Config>(arguments, turn);
  }
  __device__ __forceinline__ void advance(const AttentionBwdArguments& arguments,
                                          const BwdSmem<Config>&) {
    turn.advance(arguments);
  }
};

template <class Config>
using TileWalk = std::conditional_t<Config::kRagged, RaggedWalk<Config>, DenseWalk<Config>>;

// Steps of a tile that are still to be copied when the next is looked for.
inline constexpr int32_t kStepsAhead = 4;

// What a thread copies: K and Q, or V, dO and its rows of LSE and D.
enum class Operand { kKeys, kValues };

// Pages of a tile that a call's head dim has. The others are zeros from the start and never copied:
// for a box that is nowhere in the tensor the copy engine asks for the map's address, and what is
// there before the tensor need not be memory.
__device__ __forceinline__ int32_t pages_of(int32_t head_dim) {
  return (head_dim + kPageCols - 1) / kPageCols;
}

// All threads, before anything is copied.
template <class Config>
__device__ __forceinline__ void clear_missing_pages(const AttentionBwdProblem& problem,
                                                    const BwdSmem<Config>& smem) {
  if (pages_of(problem.head_dim) >= Config::kPagesK &&
      pages_of(problem.head_dim_v) >= Config::kPagesV) {
    return;
  }
  for (uint32_t at = smem.k() + threadIdx.x * 16; at < smem.grad_scores(0);
       at += Config::kThreads * 16) {
    ptx::shared_store(at, 0.f, 0.f, 0.f, 0.f);
  }
  ptx::fence_async_proxy();  // the copy engine and wgmma come after these stores
}

// Announces and starts the copies of a tile's pages, and announces `beside` bytes of other copies.
template <int kPages, int kPageBytes>
__device__ __forceinline__ void load_ragged(uint32_t smem, const CUtensorMap* map, uint32_t full,
                                            int32_t head_dim, const RaggedPlace& at, int32_t row,
                                            uint32_t head, uint32_t beside = 0) {
  int32_t const pages = pages_of(head_dim);
  ptx::mbarrier_arrive_expect(full, pages * kPageBytes + beside);
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    if (page >= pages) break;
    ptx::tma_load_5d(smem + page * kPageBytes, map, full, ptx::CacheHint::kEvictLast,
                     page * kPageCols, at.row + row, head, at.end, at.batch);
  }
}

// One thread: its copies of the block's tiles. Two have registers enough, one has not.
template <class Config, Operand kOperand>
__device__ __forceinline__ void copy_ragged(const AttentionBwdArguments& arguments,
                                            const BwdSmem<Config>& smem) {
  const AttentionBwdProblem& problem = arguments.problem;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (TileWalk<Config> tiles; tiles.left(arguments, smem); tiles.advance(arguments, smem)) {
    const auto& tile = tiles.tile(arguments, smem);
    // The next tile is wanted a few microseconds before all of this one's copies are started.
    int32_t left = max(problem.group * (tile.end - tile.begin), 0) + 1;
    auto want_next = [&](bool soon) {
      if (kOperand == Operand::kKeys && soon) {
        ptx::mbarrier_arrive(smem.want_tile());
      }
    };
    want_next(left <= kStepsAhead);
    if (!tile.seen()) continue;
    ptx::mbarrier_wait(smem.empty_kv(), kv.phase() ^ 1);  // the tile before is done with K and V
    kv.advance();
    if constexpr (kOperand == Operand::kKeys) {
      load_ragged<Config::kPagesK, Config::kPageBytesKV>(
          smem.k(), &arguments.k, smem.full_k(), problem.head_dim, tile.keys, 0, tile.head_kv);
    } else {
      load_ragged<Config::kPagesV, Config::kPageBytesKV>(
          smem.v(), &arguments.v, smem.full_v(), problem.head_dim_v, tile.keys, 0, tile.head_kv);
    }
    for_each_step(tile, problem.group, [&](uint32_t head, int32_t m) {
      uint32_t const s = step.stage();
      want_next(--left == kStepsAhead);
      if constexpr (kOperand == Operand::kKeys) {
        ptx::mbarrier_wait(smem.empty_q(s), step.phase() ^ 1);  // dK from this buffer is added
        load_ragged<Config::kPages, Config::kPageBytesQ>(smem.q(s), &arguments.q, smem.full_q(s),
                                                         problem.head_dim, tile.queries,
                                                         m * Config::kBlockQ, head);
      } else {
        // dV from this buffer is added
        ptx::mbarrier_wait(smem.empty_grad_out(s), step.phase() ^ 1);
        load_ragged<Config::kPagesV, Config::kPageBytesQ>(
            smem.grad_out(s), &arguments.grad_out, smem.full_grad_out(s), problem.head_dim_v,
            tile.queries, m * Config::kBlockQ, head, 2 * Config::kRowBytes);
        load_row_values<Config>(arguments, smem, s, tile.query_tile(arguments, head, m));
      }
      step.advance();
    });
  }
}

// The producer's warps: two copy, one finds what.
template <class Config>
__device__ __forceinline__ void produce_ragged(const AttentionBwdArguments& arguments,
                                               const BwdSmem<Config>& smem) {
  ptx::await_last_grid();  // it wrote LSE and D, and set the counter to 0
  if (threadIdx.x == 0) {
    copy_ragged<Config, Operand::kKeys>(arguments, smem);
  } else if (threadIdx.x == 32) {
    copy_ragged<Config, Operand::kValues>(arguments, smem);
  } else if (threadIdx.x / 32 == 2) {
    find_tiles<Config>(arguments, smem);
  }
}

}  // namespace flashvar::sm90
