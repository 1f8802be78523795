// Shared memory of the forward (fwd.cuh), and the two warps that load into it: one ring of stages
// for the state warpgroups, one for the output warpgroup.
#pragma once
#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "gated_delta_rule/chain_parts.cuh"
#include "gated_delta_rule/segment_work.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/gated_delta_rule/chain_parts.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::gated_delta_rule {

struct FwdArgs {
  FwdProblem problem;
  CUtensorMap q, k, v;         // clipped at the end of a sequence
  const ChunkRecord* records;  // [chunk][head]
  int32_t column_tiles;        // of V
  Segments segments;
  SegmentStates between;  // at boundaries, for the other passes
  // fwd_kernel: computes the segments that start at a boundary; else first segments.
  bool starts_at_boundary;
  // Pass 1: blocks of first segments; column tiles, of V and of transitions, of inner segments.
  uint32_t first_blocks;
  int32_t inner_tiles;
};

// P in shared memory as operand A, whose rows are tokens and whose columns are k. It is a Triangle,
// with zeros in place of the rest of columns 32 to 63 between its two column blocks.
struct ScoresTile {
  static constexpr int kZeros = kChunk * Triangle::kRowBytes;
  static constexpr int kLast = kZeros + Triangle::kColBlockBytes;
  static constexpr int kBytes = kLast + Triangle::kColBlockBytes;
  uint64_t base;

  explicit __device__ __forceinline__ ScoresTile(uint32_t smem)
      : base(ptx::wgmma_descriptor_64b(smem)) {}
  __device__ __forceinline__ uint64_t step(int kk) const {
    return ptx::wgmma_advance(base, kk / 2 * kZeros + kk % 2 * 32);
  }
  // Called by all threads, before the first loads.
  static __device__ __forceinline__ void zero(uint32_t smem) {
    zero_shared(smem + kZeros, kLast - kZeros);
  }
};

// kWarpgroups: state warpgroups, each of 64 columns of V; above head dim 128 one, whose state takes
// most of the registers. kOutput: false for pass 1 of segments.
template <class Target, class Dtype_, int kDim_, int kWarpgroups_, bool kOutput_ = true>
struct FwdConfig {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr bool kOutput = kOutput_;
  static constexpr int kColumns = 64 * kWarpgroups;
  // One warpgroup that loads, one for the output, those of the state.
  static constexpr int kThreads = 128 * (kWarpgroups + (kOutput ? 2 : 1));
  // setmaxnreg split, in registers per thread: 24 + 104 + 2 * 192 = 4 * 128, those at kernel entry;
  // with three warpgroups 24 + 2 * 240 = 3 * 168, of which an output warpgroup leaves some unused.
  static constexpr int kLoadRegisters = 24;
  static constexpr int kStateRegisters = kWarpgroups == 1 || !kOutput ? 240 : 192;
  static constexpr int kOutRegisters = 104;
  static constexpr int kColBlockBytes = kChunk * 128;
  static constexpr int kColBlocks = kDim / 64;
  static constexpr int kTileBytes = kColBlocks * kColBlockBytes;
  static constexpr int kVectorBytes = sizeof(ChunkRecord) - offsetof(ChunkRecord, a);

  // A stage of the state's ring: K, the first matrix, V, vectors.
  static constexpr int kSolution = kTileBytes;
  static constexpr int kV = kSolution + Triangle::kBytes;
  static constexpr int kStateVectors = kV + kWarpgroups * kColBlockBytes;
  static constexpr int kStateStageBytes = kStateVectors + kVectorBytes;
  static constexpr int kStateStages = kDim > 192 ? 2 : 3;
  // A stage of the output's ring: Q, scores, vectors.
  static constexpr int kScores = kTileBytes;
  static constexpr int kOutVectors = kScores + ScoresTile::kBytes;
  static constexpr int kOutStageBytes = kOutVectors + kVectorBytes;
  static constexpr int kOutStages = kOutput ? 2 : 0;

  // The operands that state warpgroups pass to the output warpgroup: the state before a chunk,
  // [V][K], and the chunk's updates, [V][token].
  static constexpr int kRowBlockBytes = kColumns * 128;
  static constexpr int kState = kStateStages * kStateStageBytes + kOutStages * kOutStageBytes;
  static constexpr int kUpdates = kState + kColBlocks * kRowBlockBytes;
  static constexpr int kBarriers = kUpdates + kRowBlockBytes;
  static constexpr int kSharedMemory = kBarriers + (kStateStages + kOutStages + 2) * 16;
  static_assert(kStateStageBytes % 1024 == 0 && kOutStageBytes % 1024 == 0, "swizzle periods");
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

template <class Config>
struct FwdSmem {
  uint32_t base;

  __device__ __forceinline__ uint32_t state_stage(uint32_t i) const {
    return base + i * Config::kStateStageBytes;
  }
  __device__ __forceinline__ uint32_t out_stage(uint32_t i) const {
    return base + Config::kStateStages * Config::kStateStageBytes + i * Config::kOutStageBytes;
  }
  __device__ __forceinline__ BarrierPair barriers(uint32_t i) const {
    return {base + Config::kBarriers + 16 * i};
  }
  __device__ __forceinline__ BarrierPair state_stage_barriers(uint32_t stage) const {
    return barriers(stage);
  }
  __device__ __forceinline__ BarrierPair out_stage_barriers(uint32_t stage) const {
    return barriers(Config::kStateStages + stage);
  }
  __device__ __forceinline__ BarrierPair state_barriers() const {
    return barriers(Config::kStateStages + Config::kOutStages);
  }
  __device__ __forceinline__ BarrierPair updates_barriers() const {
    return barriers(Config::kStateStages + Config::kOutStages + 1);
  }

  // Initializes the mbarriers; called by one thread.
  __device__ __forceinline__ void init() const {
    constexpr uint32_t kStateWarps = 4 * Config::kWarpgroups, kOutWarps = 4;
    for (uint32_t i = 0; i < Config::kStateStages; ++i)
      state_stage_barriers(i).init(1, kStateWarps);
    if constexpr (Config::kOutput) {
      for (uint32_t i = 0; i < Config::kOutStages; ++i) out_stage_barriers(i).init(1, kOutWarps);
      state_barriers().init(kStateWarps, kOutWarps);
      updates_barriers().init(kStateWarps, kOutWarps);
    }
    ptx::mbarrier_init_fence();
  }
};

// Numbers of column blocks that a thread block loads of each tile.
template <class Config>
struct LoadedBlocks {
  int32_t keys, values;  // of K and of Q; of V

  // `columns`: of V, from the thread block's first on.
  __device__ __forceinline__ LoadedBlocks(const FwdProblem& problem, int32_t columns)
      : keys(col_blocks_of(problem.head_dim)),
        values(min(col_blocks_of(columns), Config::kWarpgroups)) {}

  __device__ __forceinline__ bool all() const {
    return keys == Config::kColBlocks && values == Config::kWarpgroups;
  }
};

// The coordinates by which load warps locate a chunk's operands.
template <class Config>
struct FwdLoads {
  const FwdArgs& args;
  const Work& work;
  ClippedRows rows;
  LoadedBlocks<Config> blocks;

  __device__ __forceinline__ const ChunkRecord& record(int32_t row) const {
    return args.records[(work.first_chunk + row / kChunk) * args.problem.heads + work.head];
  }
};

// Loads the state's operands of every chunk. Called by one lane.
template <class Config>
__device__ __forceinline__ void load_for_state(const FwdLoads<Config>& from,
                                               const FwdSmem<Config>& smem) {
  const Work& work = from.work;
  PipelineState<Config::kStateStages> stage;
  for (int32_t row = 0; row < work.span.count; row += kChunk, stage.advance()) {
    BarrierPair const barrier = smem.state_stage_barriers(stage.stage());
    uint32_t const to = smem.state_stage(stage.stage());
    ptx::mbarrier_wait(barrier.empty(), stage.phase() ^ 1);  // its readers released it
    ptx::mbarrier_arrive_expect(barrier.full,
                                (from.blocks.keys + from.blocks.values) * Config::kColBlockBytes +
                                    Triangle::kBytes + Config::kVectorBytes);
    const ChunkRecord& record = from.record(row);
    from.rows.load(to, from.args.k, barrier.full, from.blocks.keys, 0, row, work.head_qk);
    from.rows.load(to + Config::kV, from.args.v, barrier.full, from.blocks.values, work.column, row,
                   work.head);
    ptx::bulk_load(to + Config::kSolution, record.solution, Triangle::kBytes, barrier.full);
    ptx::bulk_load(to + Config::kStateVectors, record.a, Config::kVectorBytes, barrier.full);
  }
}

// Loads the output's operands of every chunk. Called by one lane.
template <class Config>
__device__ __forceinline__ void load_for_out(const FwdLoads<Config>& from,
                                             const FwdSmem<Config>& smem) {
  const Work& work = from.work;
  PipelineState<Config::kOutStages> stage;
  for (int32_t row = 0; row < work.span.count; row += kChunk, stage.advance()) {
    BarrierPair const barrier = smem.out_stage_barriers(stage.stage());
    uint32_t const to = smem.out_stage(stage.stage());
    ptx::mbarrier_wait(barrier.empty(), stage.phase() ^ 1);  // its readers released it
    ptx::mbarrier_arrive_expect(barrier.full, from.blocks.keys * Config::kColBlockBytes +
                                                  Triangle::kBytes + Config::kVectorBytes);
    from.rows.load(to, from.args.q, barrier.full, from.blocks.keys, 0, row, work.head_qk);
    const uint16_t* const scores = from.record(row).scores;
    constexpr int kFirst = ScoresTile::kZeros;  // bytes of the first column block
    ptx::bulk_load(to + Config::kScores, scores, kFirst, barrier.full);
    // One copy of the rest: in the record the vectors follow the scores.
    static_assert(offsetof(ChunkRecord, a) == offsetof(ChunkRecord, scores) + Triangle::kBytes);
    ptx::bulk_load(to + Config::kScores + ScoresTile::kLast, scores + kFirst / 2,
                   Triangle::kBytes - kFirst + Config::kVectorBytes, barrier.full);
  }
}

}  // namespace flashvar::sm90::gated_delta_rule
