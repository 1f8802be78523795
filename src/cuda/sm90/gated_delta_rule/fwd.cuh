// The second kernel of the forward: carries the state through the chunks of a sequence, with wgmma
// and TMA. Warp-specialized: a state warpgroup holds 64 columns of the state of one head in
// registers (gated_delta_rule/chain_parts.cuh). For each chunk it passes the state before the
// chunk, and the chunk's updates, in 16 bits through shared memory to the output warpgroup, which
// computes out: the chain from state to state, which is sequential, does not wait for it. Two warps
// issue loads, one for the state's operands and one for the output's. Pass 1 of segments uses the
// same warpgroups without the output (segments.cuh).
#pragma once
#include <cstdint>

#include "gated_delta_rule/chain_parts.cuh"
#include "gated_delta_rule/large_dim.h"
#include "gated_delta_rule/segment_work.cuh"
#include "ptx/global_store.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pin.cuh"
#include "ptx/tma.cuh"
#include "ptx/vectors.cuh"
#include "ptx/warp_uniform.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/gated_delta_rule/fwd_loads.cuh"
#include "sm90/gemm.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::gated_delta_rule {

// Named barrier of the output warpgroup: all of its warps' GEMMs have read Q.
inline constexpr uint32_t kQueriesRead = 1;

// Stores a chunk's rows of out, 64 columns at a time, staged through `tile`. Each warp has 16 rows
// of out and uses the same 16 rows of the tile.
template <class Config>
__device__ __forceinline__ void store_out(const FwdProblem& problem, const Work& work,
                                          const float (&out)[Config::kColumns / 2], uint32_t tile,
                                          int32_t row) {
  int const lane_id = static_cast<int>(threadIdx.x) % 32, warp = Lane().warp;
  int const mine = 16 * warp + lane_id % 16;
  uint32_t const put = tile + Tile64::unit_offset(mine, lane_id / 16);
  int const first = 16 * warp + lane_id / 8, unit = lane_id % 8;
  int32_t const column = work.column + 8 * unit;
  uint16_t* const to = problem.out.data + work.batch * problem.out.batch_stride +
                       (int64_t{work.span.first} + row + first) * problem.out.seq_stride +
                       work.head * problem.out.head_stride + column;
#pragma unroll
  for (int block = 0; block < Config::kWarpgroups; ++block) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = out + 32 * block + 8 * step + 2 * i;
        words[i] = Config::Dtype::pack(pair[0], pair[1]);
      }
      ptx::stmatrix_x4(Tile64::advance(put, 2 * step), words);
    }
    __syncwarp();  // all lanes have written the warp's rows of the tile
    uint4 rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const token = first + 4 * i;
      rows[i] = ptx::shared_load_words(tile + Tile64::unit_offset(token, unit));
    }
    bool const exists = column + 64 * block < problem.head_dim_v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (exists && row + first + 4 * i < work.span.count) {
        ptx::global_store(to + 4 * i * problem.out.seq_stride + 64 * block, rows[i]);
      }
    }
    __syncwarp();  // all lanes have read them; the next columns overwrite them
  }
}

// Waits until the state warpgroups have stored an operand that wgmma is to read.
__device__ __forceinline__ void wait_operand(const BarrierPair& barriers, uint32_t phase) {
  ptx::mbarrier_wait(barriers.full, phase);  // the operand is stored
  ptx::fence_async_proxy();  // orders their stores, which the barrier made visible, before wgmma
}

// The output warpgroup: computes out = c o (Q S) + P U for every chunk, which is (F3).
template <class Config>
__device__ __forceinline__ void write_out(const FwdArgs& args, const FwdSmem<Config>& smem,
                                          const Work& work) {
  using Dtype = typename Config::Dtype;
  using Passed = KMajor<Config::kRowBlockBytes>;  // the state and the updates, [V] first
  using Offsets = VectorOffsets<ChunkRecord>;
  PipelineState<Config::kOutStages> stage;
  PipelineState<1>
      passed;  // what the state warpgroups pass: smem.state_barriers() and smem.updates_barriers()
  for (int32_t row = 0; row < work.span.count; row += kChunk, stage.advance(), passed.advance()) {
    uint32_t const tiles = smem.out_stage(stage.stage());
    uint32_t const vectors = tiles + Config::kOutVectors;
    BarrierPair const operands = smem.out_stage_barriers(stage.stage());
    ptx::mbarrier_wait(operands.full, stage.phase());     // Q and the record are loaded
    wait_operand(smem.state_barriers(), passed.phase());  // the state before the chunk
    // A chunk that is computed token by token: the state warpgroups write its rows of `out`.
    if (ptx::shared_load_unordered<float>(vectors + Offsets::growth) > kMaxGrowth) {
      warp_arrive(smem.state_barriers().empty());
      ptx::mbarrier_wait(smem.updates_barriers().full,
                         passed.phase());  // the state warpgroups have read Q
      warp_arrive(smem.updates_barriers().empty());
      warp_arrive(operands.empty());
      continue;
    }
    float out[Config::kColumns / 2];
    gemm_ss<Dtype, Config::kColumns, Config::kDim / 16>(out, ColumnsAsK(tiles),
                                                        Passed(smem.base + Config::kState));
    Lane const lane;
    uint32_t const c = vectors + Offsets::c + 4 * (16 * lane.warp + lane.g);
    float const factors[2] = {ptx::shared_load_unordered<float>(c),
                              ptx::shared_load_unordered<float>(c + 4 * 8)};
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(out);
    warp_arrive(smem.state_barriers().empty());
    scale_rows(out, factors);
    wait_operand(smem.updates_barriers(), passed.phase());  // the chunk's updates
    gemm_ss<Dtype, Config::kColumns, 4, true>(out, ScoresTile(tiles + Config::kScores),
                                              Passed(smem.base + Config::kUpdates));
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(out);
    warp_arrive(smem.updates_barriers().empty());
    ptx::named_barrier_sync(kQueriesRead, 128);  // all warps have read Q, over which out is staged
    store_out<Config>(args.problem, work, out, tiles, row);
    ptx::fence_async_proxy();  // orders the tile's accesses before TMA overwrites it
    warp_arrive(operands.empty());
  }
}

// Passes an operand of 64 rows to the output warpgroup through shared memory. The proxy fence is
// the reader's (wait_operand): the chain does not wait for it.
template <class Config, int kSteps>
__device__ __forceinline__ void pass_operand(const BarrierPair& barriers, uint32_t phase,
                                             uint32_t to, const uint32_t (&a)[kSteps][4],
                                             int warpgroup) {
  ptx::mbarrier_wait(barriers.empty(), phase ^ 1);  // the previous chunk's operand has been read
  store_operand<Config::kRowBlockBytes>(to, a, warpgroup);
  warp_arrive(barriers.full);
}

// Computes a chunk of large `growth` token by token, in fp32, and writes its out as well, staged
// through the tile of V. The output warpgroup only arrives on the barriers.
template <class Config>
__device__ __forceinline__ void advance_by_tokens(
    const FwdProblem& problem, const FwdSmem<Config>& smem, const Work& work, uint32_t tiles,
    uint32_t tile_v, const PipelineState<Config::kOutStages>& out_stage,
    const PipelineState<1>& passed, int32_t row, int32_t column, float (&state)[Config::kDim / 2]) {
  using Dtype = typename Config::Dtype;
  constexpr int kDim = Config::kDim;
  if constexpr (Config::kOutput) {
    // Q is loaded. The output's warpgroup releases it after updates_barriers().full, below.
    ptx::mbarrier_wait(smem.out_stage_barriers(out_stage.stage()).full, out_stage.phase());
    step_by_tokens<Dtype, kDim>(problem, work, state, tiles, smem.out_stage(out_stage.stage()),
                                tile_v, row);
    copy_out(problem, problem.out, work, tile_v, row, column);
    ptx::fence_async_proxy();  // orders the tile's accesses before TMA overwrites it
    ptx::mbarrier_wait(smem.updates_barriers().empty(),
                       passed.phase() ^ 1);  // the last have been read
    warp_arrive(smem.updates_barriers().full);
  } else {
    step_by_tokens<Dtype, kDim, false>(problem, work, state, tiles, 0, tile_v, row);
  }
}

// A state warpgroup: carries the state of its 64 columns of V, from `column` on, through all
// chunks.
template <class Config>
__device__ __forceinline__ void advance_state(const FwdArgs& args, const FwdSmem<Config>& smem,
                                              const Work& work, int warpgroup, int32_t column,
                                              float (&state)[Config::kDim / 2]) {
  using Dtype = typename Config::Dtype;
  constexpr int kDim = Config::kDim;
  constexpr bool kOutput = Config::kOutput;
  using Offsets = VectorOffsets<ChunkRecord>;
  const FwdProblem& problem = args.problem;

  PipelineState<Config::kStateStages> stage;
  PipelineState<Config::kOutStages> out_stage;
  PipelineState<1> passed;
  for (int32_t row = 0; row < work.span.count;
       row += kChunk, stage.advance(), out_stage.advance(), passed.advance()) {
    uint32_t const tiles = smem.state_stage(stage.stage());
    uint32_t const tile_v = tiles + Config::kV + warpgroup * Config::kColBlockBytes;
    uint32_t const vectors = tiles + Config::kStateVectors;
    BarrierPair const operands = smem.state_stage_barriers(stage.stage());
    uint32_t packed_state[kDim / 16][4];
    pack<Dtype>(packed_state, state);
    // A copy in registers of its own: those of packed_state must not be accessed while the GEMM
    // that is issued below reads them. Large states leave no registers for it, and are passed
    // first.
    constexpr bool kPassFirst = kLargeDim<kDim>;
    uint32_t passed_state[kDim / 16][4];
    if constexpr (kOutput) {
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) {
        uint32_t const word = packed_state[i / 4][i % 4];
        passed_state[i / 4][i % 4] = kPassFirst ? word : ptx::pin(word);
      }
    }
    auto const pass_state = [&] {
      if constexpr (kOutput) {
        pass_operand<Config>(smem.state_barriers(), passed.phase(), smem.base + Config::kState,
                             passed_state, warpgroup);
      }
    };
    ptx::mbarrier_wait(operands.full, stage.phase());  // the chunk is loaded
    if (ptx::shared_load_unordered<float>(vectors + Offsets::growth) > kMaxGrowth) {
      pass_state();
      advance_by_tokens(problem, smem, work, tiles, tile_v, out_stage, passed, row, column, state);
      warp_arrive(operands.empty());
      continue;
    }
    float predicted[32], update[32];  // S^T K^T, then W^T; U^T
    if (kPassFirst) pass_state();
    gemm_rs<Dtype, 64, kDim / 16, ColumnsAsK, false>(predicted, packed_state, ColumnsAsK(tiles));
    if (kPassFirst) {
      ptx::wgmma_wait<0>();  // before the loads below, which reuse packed_state's registers
    } else {
      pass_state();  // while the GEMM runs
    }
    ValueTile const values(tile_v);
    TokenFactors const a(vectors);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(predicted);
    uint32_t packed[4][4], packed_decayed[4][4];
    float descale[2];
    values.template subtract<Dtype>(predicted, a);  // (F1)
    pack_scaled(packed, predicted, descale);
    gemm_triangle<dtype::fp16, false, false>(update, packed, tiles + Config::kSolution);  // (F2)
    // All instructions of the GEMM are issued. While it runs, the state is decayed.
    ptx::wgmma_fence_operand(state);
    TokenFactors const b(vectors + Offsets::b);
    float const decay = ptx::shared_load_unordered<float>(vectors + Offsets::decay);
#pragma unroll
    for (float& value : state) value *= decay;  // (F4)
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(update);
    scale_rows(update, descale);
    float decayed[32];  // b o U^T
#pragma unroll
    for (int i = 0; i < 32; ++i) decayed[i] = update[i];
    b.scale(decayed);
    pack<Dtype>(packed_decayed, decayed);
    gemm_rs<Dtype, kDim, 4>(state, packed_decayed, RowsAsK(tiles));  // (F4)
    if constexpr (kOutput) {
      // While the GEMM runs: pass the updates to the output warpgroup.
      pack<Dtype>(packed, update);
      pass_operand<Config>(smem.updates_barriers(), passed.phase(), smem.base + Config::kUpdates,
                           packed, warpgroup);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(state);
    warp_arrive(operands.empty());
  }
}

// Computes the output of a segment, and the state after it. Called by all threads of the block.
template <class Config>
__device__ __forceinline__ void run_segment(const FwdArgs& args, const SegmentWork& work,
                                            unsigned char* shared) {
  FwdSmem<Config> const smem{ptx::smem_address(shared)};
  if (threadIdx.x == 0) smem.init();
  const FwdProblem& problem = args.problem;
  LoadedBlocks<Config> const blocks(problem, problem.head_dim_v - work.column);
  if (!blocks.all()) zero_shared(smem.base, Config::kState);
  for (uint32_t i = 0; i < Config::kOutStages; ++i) {
    ScoresTile::zero(smem.out_stage(i) + Config::kScores);
  }
  // Visible after it: the initialized mbarriers, and the zeros of column blocks that are never
  // loaded and of P above the diagonal.
  __syncthreads();
  uint32_t const warpgroup = ptx::warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kLoadRegisters>();
    FwdLoads<Config> const loads{args, work, ClippedRows(problem, work), blocks};
    if (threadIdx.x < 64 && ptx::elect_one()) {
      ptx::griddepcontrol_wait();  // prepare and pass 2 are complete
      if (threadIdx.x < 32) {
        load_for_state(loads, smem);
      } else {
        load_for_out(loads, smem);
      }
    }
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_dec<Config::kOutRegisters>();
    write_out(args, smem, work);
  } else {
    ptx::setmaxnreg_inc<Config::kStateRegisters>();
    int const mine = static_cast<int>(warpgroup) - 2;
    int32_t const column = work.column + 64 * mine;
    float state[Config::kDim / 2];
    load_first_state<Config::kDim>(problem, args.between, work, column, state);
    advance_state(args, smem, work, mine, column, state);
    if (!args.starts_at_boundary) {
      store_state_after<Config::kDim>(problem, args.between, work, column, state);
    }
    store_final_state<Config::kDim>(problem, work, column, state);
  }
}

// Grid, on one axis: segments x heads x column tiles of V. The segments are those that start at a
// boundary (args.starts_at_boundary), or the first of each sequence.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdProblem& problem = args.problem;
  SegmentWork const work =
      args.starts_at_boundary
          ? SegmentWork::starting_at_boundary(problem, args.segments, args.column_tiles,
                                              Config::kColumns)
          : SegmentWork::first_segment(problem, args.segments, args.column_tiles, Config::kColumns);
  // Blocks without work wait, too: see griddepcontrol_wait().
  if (work.exists) {
    run_segment<Config>(args, work, shared);
  } else {
    ptx::griddepcontrol_wait();
  }
}

}  // namespace flashvar::sm90::gated_delta_rule
