// Key tiles and producer of all variants of the dK and dV kernel but kDense. They support lengths
// that are known only on the device (varlen, seqused_k), short windows (has_short_windows), for
// which the dense kernel has no registers, and divided query blocks.
//
// Tiles of varlen sequences differ in work, and locating one takes several dependent memory
// accesses. Therefore CTAs take work units from a counter (dynamic schedule), and a scheduler warp
// of the producer warpgroup writes the tiles into slots of shared memory ahead of the load threads
// and consumers.
#pragma once
#include <cstdint>
#include <type_traits>

#include "attention/problem.h"
#include "core/ceil_div.h"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/attention/key_tile.cuh"

namespace flashvar::sm90::attention {

// Coordinates of rows in a clipped tensor map (sm90/clipped_map.h).
struct ClippedCoordinate {
  int32_t row, end;
  uint32_t batch;

  // Coordinates of row `row` of a sequence. `span`: the sequence's rows, after which TMA writes
  // zeros.
  __device__ __forceinline__ ClippedCoordinate(const Sequences& sequences, const Span& span,
                                               uint32_t batch, int32_t row)
      : row((sequences.offsets == nullptr ? sequences.seqlen : sequences.total) - span.count + row),
        end(span.first + span.count),
        batch(sequences.offsets == nullptr ? batch : 0) {}
};

// DynamicKeyTile: a KeyTile of a dynamic schedule, stored in a slot of shared memory.
template <class Config>
struct DynamicKeyTile {
  Mask mask;  // of the keys in use
  uint32_t batch, split_head;
  uint32_t heads;      // part_of_heads()
  int32_t first_key;   // within the sequence; negative: no more tiles
  int32_t begin, end;  // query blocks
  Span all;            // keys of the sequence, in use or not
  int32_t first_query_tile;
  uint32_t kv_loads;  // loads of K and V by this CTA before this tile: the count of their pipeline
  ClippedCoordinate queries, keys;  // of the sequence's first query, of the tile's first key

  __device__ __forceinline__ void fill(const BwdArgs& args, const TileCoordinate& coordinate,
                                       uint32_t head, Span span_k) {
    const BwdProblem& problem = args.problem;
    batch = coordinate.batch;
    split_head = head;
    heads = head / args.splits.queries_divisor;
    first_key = coordinate.first;
    all = span_k;
    Span const in_use = problem.keys_in_use(batch, all);
    int32_t const used = in_use.count;
    keys = ClippedCoordinate(problem.keys, in_use, batch, first_key);
    Span const span = problem.queries.span(batch);
    queries = ClippedCoordinate(problem.queries, span, batch, 0);
    first_query_tile = static_cast<int32_t>(problem.queries.first_tile(batch, Config::kBlockQ));
    mask = {span.count, used, problem.window_left, problem.window_right};
    begin = end = 0;
    if (first_key >= used) return;
    int32_t const last = min(first_key + Config::kBlockKV, used) - 1;
    begin = mask.query_begin(first_key) / Config::kBlockQ;
    end = ceil_div(mask.query_end(last), Config::kBlockQ);
    // The query blocks of this part. count_query_parts() has checked that the products fit 31 bits.
    int32_t const parts = args.splits.queries, part = static_cast<int32_t>(head - heads * parts);
    int32_t const count = max(end - begin, 0), first = begin;
    begin = first + count * part / args.splits.queries_divisor;
    end = first + count * (part + 1) / args.splits.queries_divisor;
  }

  // As in KeyTile. It is the same for all parts of the query blocks of the same heads.
  __device__ __forceinline__ uint32_t part_of_heads() const { return heads; }

  // Always from the last query block to the first: the first keys, which have the most work under a
  // causal mask, start first.
  __device__ __forceinline__ static constexpr bool reversed() { return true; }
  // Not without dQ: then only Q and dO must be in L2, and there are no registers for a second
  // order.
  __device__ __forceinline__ static bool heads_outermost(const BwdArgs& args) {
    return Config::kGradQ && args.heads_outermost;
  }

  __device__ __forceinline__ static constexpr bool exists() { return true; }
  __device__ __forceinline__ bool has_queries() const { return begin < end; }

  __device__ __forceinline__ Span rows() const { return all; }
  // The sequence's rows of q and dQ.
  __device__ __forceinline__ Span query_rows() const {
    return {queries.end - mask.seqlen_q, mask.seqlen_q};
  }

  __device__ __forceinline__ uint32_t query_tile(const BwdArgs& args, uint32_t head,
                                                 uint32_t m) const {
    return head * args.query_tiles + first_query_tile + m;
  }
};

template <class Config>
__device__ __forceinline__ DynamicKeyTile<Config>& shared_tile(const KeyTileSmem<Config>& smem,
                                                               uint32_t slot) {
  static_assert(sizeof(DynamicKeyTile<Config>) <= kTileBytes);
  return *static_cast<DynamicKeyTile<Config>*>(__cvta_shared_to_generic(smem.tile(slot)));
}

// The scheduler warp: writes the CTA's key tiles into slots, then a tile with first_key -1.
template <class Config>
__device__ __forceinline__ void schedule_key_tiles(const BwdArgs& args,
                                                   const KeyTileSmem<Config>& smem) {
  const BwdProblem& problem = args.problem;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<kTileSlots> slot;
  uint32_t kv_loads = 0;
  // All readers have released the slot.
  auto wait_slot = [&] { ptx::mbarrier_wait(smem.empty_tile(slot.stage()), slot.phase() ^ 1); };
  auto next_unit = [&] {
    uint32_t unit = 0;
    if (first_lane) unit = atomicAdd(args.counters, 1);
    return __shfl_sync(0xffffffffu, unit, 0);
  };
  for (uint32_t unit = next_unit(); unit < args.work_units; unit = next_unit()) {
    TileCoordinate coordinate;
    uint32_t split_head = unit / args.units_per_head;
    uint32_t const number = unit % args.units_per_head;
    if (problem.keys.offsets == nullptr) {
      uint32_t const heads = args.split_heads();
      coordinate = {split_head / heads, static_cast<int32_t>(number * Config::kBlockKV)};
      split_head %= heads;
    } else {
      coordinate =
          problem.keys.find(number, static_cast<uint32_t>(problem.batch), Config::kBlockKV);
    }
    Span const keys = problem.keys.span(coordinate.batch);
    bool const exists = coordinate.first < keys.count;
    if (exists && first_lane) {
      wait_slot();
      DynamicKeyTile<Config>& tile = shared_tile(smem, slot.stage());
      tile.fill(args, coordinate, split_head, keys);
      tile.kv_loads = kv_loads;
      kv_loads += tile.has_queries() ? 1 : 0;
      ptx::mbarrier_arrive(smem.full_tile(slot.stage()));
    }
    __syncwarp();  // the first lane has filled the tile
    if (!exists) continue;
    // The next unit is taken only when a load thread requests it. If it were taken earlier, it
    // might wait here while another CTA is idle.
    ptx::mbarrier_wait(smem.tile_request(), PipelineState<1>{slot.count}.phase());
    slot.advance();
  }
  if (!first_lane) return;
  wait_slot();
  shared_tile(smem, slot.stage()).first_key = -1;
  ptx::mbarrier_arrive(smem.full_tile(slot.stage()));
}

// Iterators over a CTA's key tiles, for load threads and consumers. Dynamic: every thread releases
// a slot for itself.
template <class Config>
struct DynamicKeyTiles {
  PipelineState<kTileSlots> slot;

  __device__ __forceinline__ bool has_tile(const BwdArgs&, const KeyTileSmem<Config>& smem) {
    ptx::mbarrier_wait(smem.full_tile(slot.stage()), slot.phase());  // the slot is written
    return shared_tile(smem, slot.stage()).first_key >= 0;
  }
  __device__ __forceinline__ const DynamicKeyTile<Config>& tile(
      const BwdArgs&, const KeyTileSmem<Config>& smem) const {
    return shared_tile(smem, slot.stage());
  }
  __device__ __forceinline__ void advance(const BwdArgs&, const KeyTileSmem<Config>& smem) {
    ptx::mbarrier_arrive(smem.empty_tile(slot.stage()));
    slot.advance();
  }
};

template <class Config>
struct StaticKeyTiles {
  KeyWork work;

  __device__ __forceinline__ bool has_tile(const BwdArgs& args, const KeyTileSmem<Config>&) const {
    return work.exists(args);
  }
  __device__ __forceinline__ KeyTile<Config> tile(const BwdArgs& args,
                                                  const KeyTileSmem<Config>&) const {
    return KeyTile<Config>(args, work);
  }
  __device__ __forceinline__ void advance(const BwdArgs&, const KeyTileSmem<Config>&) {
    ++work.taken;
  }
};

template <class Config>
using KeyTiles =
    std::conditional_t<Config::kDynamic, DynamicKeyTiles<Config>, StaticKeyTiles<Config>>;

// Steps of a tile still to be loaded when a load thread requests the next tile. They take a few
// microseconds, in which the scheduler warp locates it.
inline constexpr int32_t kStepsAhead = 4;

// The two load threads, by what they load. kKeys: K and Q; kValues: V, dO, LSE and delta.
enum class LoadThread { kKeys, kValues };

// Zeros the column blocks that the GEMMs read beyond a call's smaller head dim. Called by all
// threads, before any load.
template <class Config>
__device__ __forceinline__ void zero_missing_col_blocks(const BwdProblem& problem,
                                                        const KeyTileSmem<Config>& smem) {
  if (col_blocks_of(problem.head_dim) >= Config::kColBlocksK &&
      col_blocks_of(problem.head_dim_v) >= Config::kColBlocksV) {
    return;
  }
  for (uint32_t at = smem.k() + threadIdx.x * 16; at < smem.ds(0); at += Config::kThreads * 16) {
    ptx::shared_store(at, 0.f, 0.f, 0.f, 0.f);
  }
  ptx::fence_async_proxy();  // the zeros are visible to TMA and wgmma
}

// Loads a tile's column blocks from row `row` on, relative to `at`. Completes on the mbarrier
// `full`, which also expects `extra` bytes of other loads.
template <int kColBlocks, int kColBlockBytes>
__device__ __forceinline__ void load_clipped_tile(uint32_t smem, const CUtensorMap* map,
                                                  uint32_t full, int32_t head_dim,
                                                  const ClippedCoordinate& at, int32_t row,
                                                  uint32_t head, uint32_t extra = 0) {
  int32_t const col_blocks = col_blocks_of(head_dim);
  ptx::mbarrier_arrive_expect(full, col_blocks * kColBlockBytes + extra);
#pragma unroll
  for (int col_block = 0; col_block < kColBlocks; ++col_block) {
    if (col_block >= col_blocks) break;
    ptx::tma_load_5d(smem + col_block * kColBlockBytes, map, full, ptx::CacheHint::kEvictLast,
                     col_block * kColBlockCols, at.row + row, head, at.end, at.batch);
  }
}

// One of the two load threads. Two, because setmaxnreg leaves one thread too few registers for all
// operands.
template <class Config, LoadThread kThread>
__device__ __forceinline__ void bwd_load_operand(const BwdArgs& args,
                                                 const KeyTileSmem<Config>& smem) {
  const BwdProblem& problem = args.problem;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (KeyTiles<Config> tiles; tiles.has_tile(args, smem); tiles.advance(args, smem)) {
    const auto& tile = tiles.tile(args, smem);
    // Steps still to be loaded, plus 1. The next tile is requested kStepsAhead steps before this
    // one's last load, or at once if it has fewer.
    int32_t left = max(problem.group * (tile.end - tile.begin), 0) + 1;
    auto request_next = [&](bool due) {
      if (kThread == LoadThread::kKeys && due) {
        ptx::mbarrier_arrive(smem.tile_request());
      }
    };
    request_next(left <= kStepsAhead);
    if (!tile.has_queries()) continue;
    // K or V is loaded after the first Q or dO, whose stages are free while the previous tile still
    // holds K and V.
    auto load_kv = [&] {
      // The previous tile has released K and V.
      ptx::mbarrier_wait(smem.empty_kv(), kv.phase() ^ 1);
      kv.advance();
      if constexpr (kThread == LoadThread::kKeys) {
        load_clipped_tile<Config::kColBlocksK, Config::kColBlockBytesKV>(
            smem.k(), &args.k, smem.full_k(), problem.head_dim, tile.keys, 0,
            tile.split_head / args.splits.count_divisor);
      } else {
        load_clipped_tile<Config::kColBlocksV, Config::kColBlockBytesKV>(
            smem.v(), &args.v, smem.full_v(), problem.head_dim_v, tile.keys, 0,
            tile.split_head / args.splits.count_divisor);
      }
    };
    bool first = true;
    for_each_step(args, tile, [&](uint32_t head, int32_t m) {
      uint32_t const s = step.stage();
      request_next(--left == kStepsAhead);
      if constexpr (kThread == LoadThread::kKeys) {
        // dK, which read this stage, is complete.
        ptx::mbarrier_wait(smem.empty_q(s), step.phase() ^ 1);
        load_clipped_tile<Config::kColBlocks, Config::kColBlockBytesQ>(
            smem.q(s), &args.q, smem.full_q(s), problem.head_dim, tile.queries, m * Config::kBlockQ,
            head);
      } else {
        // dV, which read this stage, is complete.
        ptx::mbarrier_wait(smem.empty_grad_out(s), step.phase() ^ 1);
        load_clipped_tile<Config::kColBlocksV, Config::kColBlockBytesQ>(
            smem.grad_out(s), &args.grad_out, smem.full_grad_out(s), problem.head_dim_v,
            tile.queries, m * Config::kBlockQ, head, 2 * Config::kRowBytes);
        load_row_values<Config>(args, smem, s, tile.query_tile(args, head, m));
      }
      if (first) load_kv();
      first = false;
      step.advance();
    });
  }
}

// The producer warpgroup: two load threads and the scheduler warp.
template <class Config>
__device__ __forceinline__ void bwd_produce_dynamic(const BwdArgs& args,
                                                    const KeyTileSmem<Config>& smem) {
  // The preprocess kernel is complete: LSE and delta are written, the counter is zeroed.
  ptx::griddepcontrol_wait();
  if (threadIdx.x == 0) {
    bwd_load_operand<Config, LoadThread::kKeys>(args, smem);
  } else if (threadIdx.x == 32) {
    bwd_load_operand<Config, LoadThread::kValues>(args, smem);
  } else if (threadIdx.x / 32 == 2) {
    schedule_key_tiles<Config>(args, smem);
  }
}

}  // namespace flashvar::sm90::attention
