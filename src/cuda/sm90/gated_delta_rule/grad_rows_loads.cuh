// Shared memory of rows_kernel (grad_rows.cuh), and the two warps that load into it.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "core/smem_layout.cuh"
#include "ptx/bulk.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/gated_delta_rule/grad_products.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::gated_delta_rule {

struct RowsArgs {
  BwdProblem problem;
  GradWorkspace workspace;
  CUtensorMap q, k, grad_out, grad_v;  // clipped at the end of a sequence
  uint32_t items;                      // chunks of all sequences times heads of q and k
};

template <class Target, class Dtype_, int kDim_>
struct RowsConfig : RowsSlot<SmemLayout<kChunk, kDim_>::kBytes> {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  static constexpr int kColumns = kDim / 2;  // of a warpgroup
  static constexpr int kThreads = 384;
  // setmaxnreg split, in registers per thread: 40 + 2 * 232 = 3 * 168, those at kernel entry.
  static constexpr int kLoadRegisters = 40;
  static constexpr int kRegisters = 232;
  using Slot = RowsSlot<SmemLayout<kChunk, kDim>::kBytes>;
  using Tile = SmemLayout<kChunk, kDim>;  // Q, K, and the images of S^T and dS^T
  static constexpr int kColBlockBytes = Tile::kColBlockBytes;
  static constexpr int kColBlocks = Tile::kColBlocks;

  static constexpr int kK = Tile::kBytes;
  static constexpr int kSlots = 2 * Tile::kBytes;
  static constexpr int kSlotCount = kDim == 64 ? 4 : 3;
  // After the slots: dQK and dKK, vectors of two heads, sums, two items.
  static constexpr int kSquares = kSlots + kSlotCount * Slot::kSlotBytes;
  static constexpr int kVectors = kSquares + 2 * kTile64Bytes;
  static constexpr int kSums = kVectors + 2 * static_cast<int>(sizeof(RecordVectors));
  static constexpr int kItems = kSums + static_cast<int>(sizeof(GateSumsByWarp));
  static constexpr int kItemBytes = 32;
  static constexpr int kBarriers = kItems + 2 * kItemBytes;
  static constexpr int kSharedMemory = kBarriers + (kSlotCount + 2 + 2 + 1) * 16;
  static_assert(kItems % 16 == 0 && sizeof(RowsItem) <= kItemBytes);
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// Length of the item that marks the end of a block's queue.
inline constexpr int32_t kNoItem = -1;

template <class Config>
struct RowsSmem {
  unsigned char* start;
  uint32_t base;

  explicit __device__ __forceinline__ RowsSmem(unsigned char* start)
      : start(start), base(ptx::smem_address(start)) {}

  __device__ __forceinline__ uint32_t slot(uint32_t i) const {
    return base + Config::kSlots + i * Config::kSlotBytes;
  }
  __device__ __forceinline__ RecordVectors& vectors(uint32_t i) const {
    return reinterpret_cast<RecordVectors*>(start + Config::kVectors)[i];
  }
  __device__ __forceinline__ GateSumsByWarp& sums() const {
    return *reinterpret_cast<GateSumsByWarp*>(start + Config::kSums);
  }
  __device__ __forceinline__ RowsItem& item(uint32_t i) const {
    return *reinterpret_cast<RowsItem*>(start + Config::kItems + Config::kItemBytes * i);
  }
  __device__ __forceinline__ BarrierPair barriers(uint32_t i) const {
    return {base + Config::kBarriers + 16 * i};
  }
  __device__ __forceinline__ BarrierPair slot_barriers(uint32_t i) const { return barriers(i); }
  __device__ __forceinline__ BarrierPair vectors_barriers(uint32_t i) const {
    return barriers(Config::kSlotCount + i);
  }
  __device__ __forceinline__ BarrierPair item_barriers(uint32_t i) const {
    return barriers(Config::kSlotCount + 2 + i);
  }
  __device__ __forceinline__ BarrierPair tiles_barriers() const {
    return barriers(Config::kSlotCount + 4);
  }

  // Initializes the mbarriers; called by one thread.
  __device__ __forceinline__ void init() const {
    constexpr uint32_t kRowsWarps = 8, kStatesWarps = 2;
    for (uint32_t i = 0; i < Config::kSlotCount; ++i) {
      slot_barriers(i).init(1, kRowsWarps + kStatesWarps);
    }
    for (uint32_t i = 0; i < 2; ++i) vectors_barriers(i).init(1, kRowsWarps);
    for (uint32_t i = 0; i < 2; ++i) item_barriers(i).init(1, kRowsWarps + kStatesWarps);
    tiles_barriers().init(1, kRowsWarps);
    ptx::mbarrier_init_fence();
  }
};

template <class Config>
using SlotState = PipelineState<Config::kSlotCount>;

// Reads the block's items, in order, from a queue of two in shared memory, which load_items()
// fills. For warps that do not search for the items themselves (for_each_item).
template <class Config>
struct ItemQueue {
  const RowsSmem<Config>& smem;
  PipelineState<2> state;

  // Receives the next item; false after the last. Called by whole warps.
  __device__ __forceinline__ bool next(RowsItem& item) {
    BarrierPair const barrier = smem.item_barriers(state.stage());
    ptx::mbarrier_wait(barrier.full, state.phase());  // the item is written
    item = smem.item(state.stage());
    warp_arrive(barrier.empty());
    state.advance();
    return item.length != kNoItem;
  }
};

// Calls f(item) for each of the block's items, with whole warps. Skips surplus chunks, and careful
// ones, which have a kernel of their own.
template <class F>
__device__ __forceinline__ void for_each_item(const RowsArgs& args, F f) {
  ptx::griddepcontrol_wait();               // the chains are complete
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel's blocks may start as SMs become
                                            // free
  for (uint32_t i = blockIdx.x; i < args.items; i += gridDim.x) {
    __syncwarp();  // f() lets one lane issue loads: the lanes converge again
    RowsItem const item(args.problem, i);
    if (item.count() > 0 && !item.careful(args.problem, args.workspace)) f(item);
  }
}

// Loads the slots of all heads. Called by one warp.
template <class Config>
__device__ __forceinline__ void load_slots(const RowsArgs& args, const RowsSmem<Config>& smem) {
  const GradWorkspace& workspace = args.workspace;
  int32_t const group = args.problem.group;
  SlotState<Config> slot;
  auto const load = [&](const RowsItem& item, int32_t i, int32_t tile) {
    BarrierPair const barrier = smem.slot_barriers(slot.stage());
    uint32_t const to = smem.slot(slot.stage()), full = barrier.full;
    uint32_t const head = item.head(args.problem, i);
    int64_t const from = item.record(args.problem, i) * workspace.tiles + tile;
    ClippedRows const rows(args.problem, {item.begin, item.length}, item.batch);
    ptx::mbarrier_wait(barrier.empty(), slot.phase() ^ 1);  // all warps have released the slot
    ptx::mbarrier_arrive_expect(full, Config::kSlotBytes);
    rows.load(to + Config::kGradOut, args.grad_out, full, 1, 64 * tile, item.first, head);
    rows.load(to + Config::kGradValues, args.grad_v, full, 1, 64 * tile, item.first, head);
    ptx::bulk_load(to + Config::kResiduals, workspace.residuals + from * kTile64Bytes, kTile64Bytes,
                   full);
    ptx::bulk_load(to + Config::kState, workspace.states + from * Config::Tile::kBytes,
                   Config::Tile::kBytes, full);
    ptx::bulk_load(to + Config::kGradState, workspace.grad_states + from * Config::Tile::kBytes,
                   Config::Tile::kBytes, full);
  };
  for_each_item(args, [&](const RowsItem& item) {
    bool const loads = ptx::elect_one();
    for (int32_t i = 0; i < group; ++i) {
      for (int32_t tile = 0; tile < workspace.tiles; ++tile, slot.advance()) {
        if (loads) load(item, i, tile);
      }
    }
  });
}

// Fills the queue of items, and loads their Q and K and the vectors of their heads. Called by one
// warp.
template <class Config>
__device__ __forceinline__ void load_items(const RowsArgs& args, const RowsSmem<Config>& smem) {
  const BwdProblem& problem = args.problem;
  int32_t const blocks = col_blocks_of(problem.head_dim);
  PipelineState<2> item_state, vectors_state;
  PipelineState<1> tiles_state;
  auto const publish = [&](const RowsItem& item) {
    BarrierPair const barrier = smem.item_barriers(item_state.stage());
    ptx::mbarrier_wait(barrier.empty(), item_state.phase() ^ 1);  // the slot of the queue is free
    smem.item(item_state.stage()) = item;
    ptx::mbarrier_arrive(barrier.full);
  };
  auto const load = [&](const RowsItem& item) {
    publish(item);
    BarrierPair const tiles = smem.tiles_barriers();
    ptx::mbarrier_wait(tiles.empty(), tiles_state.phase() ^ 1);  // all warps have released Q and K
    ptx::mbarrier_arrive_expect(tiles.full, 2 * blocks * Config::kColBlockBytes);
    ClippedRows const rows(problem, {item.begin, item.length}, item.batch);
    rows.load(smem.base, args.q, tiles.full, blocks, 0, item.first, item.head_qk);
    rows.load(smem.base + Config::kK, args.k, tiles.full, blocks, 0, item.first, item.head_qk);
    PipelineState<2> vectors = vectors_state;
    for (int32_t i = 0; i < problem.group; ++i, vectors.advance()) {
      BarrierPair const barrier = smem.vectors_barriers(vectors.stage());
      ptx::mbarrier_wait(barrier.empty(), vectors.phase() ^ 1);  // the vectors are released
      ptx::mbarrier_arrive_expect(barrier.full, sizeof(RecordVectors));
      ptx::bulk_load(ptx::smem_address(&smem.vectors(vectors.stage())),
                     args.workspace.records[item.record(problem, i)].a, sizeof(RecordVectors),
                     barrier.full);
    }
  };
  for_each_item(args, [&](const RowsItem& item) {
    if (ptx::elect_one()) load(item);
    item_state.advance();
    tiles_state.advance();
    vectors_state.count += problem.group;
  });
  __syncwarp();  // converged again, as elect_one() requires
  if (ptx::elect_one()) {
    RowsItem end{};
    end.length = kNoItem;
    publish(end);
  }
}

}  // namespace flashvar::sm90::gated_delta_rule
