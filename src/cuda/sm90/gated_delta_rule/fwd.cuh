// The second kernel of the forward: a chain through the chunks of a sequence, with wgmma and TMA.
//
// A consumer warpgroup has 64 columns of the state of one head (gated_delta_rule/chain.cuh). One
// warp loads.
#pragma once
#include <cstdint>

#include "gated_delta_rule/chain.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/gemm.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::gated_delta_rule {

using namespace flashvar::gated_delta_rule;  // what all architectures share

struct FwdArgs {
  FwdProblem problem;
  CUtensorMap q, k, v;         // clipped at the end of a sequence
  const ChunkRecord* records;  // [chunk][head]
  int32_t column_tiles;        // of V
};

// kWarpgroups: consumers, each of 64 columns of V.
template <class Target, class Dtype_, int kDim_, int kWarpgroups_>
struct FwdConfig {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kColumns = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);  // the producer's warpgroup first
  static constexpr int kColBlockBytes = kChunk * 128;
  static constexpr int kColBlocks = kDim / 64;

  // A stage: K, Q, the record, V.
  static constexpr int kTileBytes = kColBlocks * kColBlockBytes;
  static constexpr int kQ = kTileBytes;
  static constexpr int kRecord = 2 * kTileBytes;
  static constexpr int kV = kRecord + static_cast<int>(sizeof(ChunkRecord));
  static constexpr int kStageBytes = kV + kWarpgroups * kColBlockBytes;
  static constexpr int kStages = 3;
  static constexpr int kSharedMemory = kStages * kStageBytes + kStages * 16;
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

template <class Config>
struct FwdSmem {
  uint32_t base;

  __device__ __forceinline__ uint32_t stage(uint32_t i) const {
    return base + i * Config::kStageBytes;
  }
  __device__ __forceinline__ uint32_t full(uint32_t i) const {
    return base + Config::kStages * Config::kStageBytes + 16 * i;
  }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return full(i) + 8; }
};

// Loads every chunk; one lane of the producer warp.
template <class Config>
__device__ __forceinline__ void fwd_produce(const FwdArgs& args, const FwdSmem<Config>& smem,
                                            const Work& work) {
  const FwdProblem& problem = args.problem;
  int32_t const end = work.span.first + work.span.count;
  int32_t const shift = problem.rows.seqlen - work.span.count;  // of clipped maps
  const ChunkRecord* record = args.records + work.first_chunk * problem.heads + work.head;
  PipelineState<Config::kStages> stage;
  auto load = [&](uint32_t to, const CUtensorMap* map, int32_t column, int32_t row, uint32_t head) {
    ptx::tma_load_5d(to, map, smem.full(stage.stage()), ptx::CacheHint::kNormal, column,
                     shift + row, static_cast<int32_t>(head), end, work.batch);
  };
  for (int32_t row = 0; row < work.span.count; row += kChunk) {
    uint32_t const full = smem.full(stage.stage()), to = smem.stage(stage.stage());
    ptx::mbarrier_wait(smem.empty(stage.stage()), stage.phase() ^ 1);  // consumers have left it
    ptx::mbarrier_arrive_expect(full, Config::kStageBytes);
#pragma unroll
    for (int i = 0; i < Config::kColBlocks; ++i) {
      load(to + i * Config::kColBlockBytes, &args.k, 64 * i, row, work.head_qk);
      load(to + Config::kQ + i * Config::kColBlockBytes, &args.q, 64 * i, row, work.head_qk);
    }
#pragma unroll
    for (int i = 0; i < Config::kWarpgroups; ++i) {
      load(to + Config::kV + i * Config::kColBlockBytes, &args.v, work.column + 64 * i, row,
           work.head);
    }
    ptx::bulk_load(to + Config::kRecord, record, sizeof(ChunkRecord), full);
    record += problem.heads;
    stage.advance();
  }
}

// A consumer warpgroup: the chain of its 64 columns of V.
template <class Config>
__device__ __forceinline__ void fwd_consume(const FwdArgs& args, const FwdSmem<Config>& smem,
                                            const Work& work, int warpgroup) {
  using Dtype = typename Config::Dtype;
  constexpr int kDim = Config::kDim;
  using Rows = KMajor<Config::kColBlockBytes>;      // K, Q, update and P as they lie
  using Columns = MnMajor<Config::kColBlockBytes>;  // K by tokens
  const FwdProblem& problem = args.problem;
  int32_t const column = work.column + 64 * warpgroup;

  float state[kDim / 2] = {};
  if (problem.initial_state.data != nullptr) {
    each_of_state<kDim>(problem, problem.initial_state, work, column,
                        [&](int i, const float* from) { state[i] = *from; });
  }
  uint32_t packed_state[kDim / 16][4];
  pack<Dtype>(packed_state, state);

  PipelineState<Config::kStages> stage;
  for (int32_t row = 0; row < work.span.count; row += kChunk, stage.advance()) {
    uint32_t const tiles = smem.stage(stage.stage());
    uint32_t const record = tiles + Config::kRecord;
    uint32_t const tile_v = tiles + Config::kV + warpgroup * Config::kColBlockBytes;
    uint32_t const vectors = record + offsetof(ChunkRecord, a);
    auto release = [&] {
      ptx::fence_async_proxy();  // what the lanes wrote to V's tile comes before the next load
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.empty(stage.stage()));
    };
    ptx::mbarrier_wait(smem.full(stage.stage()), stage.phase());  // the chunk is loaded
    if (growth_of(vectors) > kMostGrowth) {
      step_by_tokens<Dtype, kDim>(problem, work, state, tiles, tiles + Config::kQ, tile_v, row);
      copy_out(problem, problem.out, work, tile_v, row, column);
      pack<Dtype>(packed_state, state);
      release();
      continue;
    }
    float known[32], out[32], update[32];
    gemm_rs<Dtype, 64, kDim / 16, Rows, false>(known, packed_state, Rows(tiles));
    gemm_rs<Dtype, 64, kDim / 16, Rows, false>(out, packed_state, Rows(tiles + Config::kQ));
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operand(known);
    uint32_t packed[4][4], packed_kept[4][4];
    float undo[2];
    subtract_known<Dtype>(known, tile_v, vectors);
    pack_scaled(packed, known, undo);
    gemm_rs<dtype::fp16, 64, 4, Rows, false>(update, packed, Rows(record));
    // Beside the product: the state decays, and what it gives to out is scaled.
    float const decay = decay_of(vectors);
#pragma unroll
    for (float& value : state) value *= decay;
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operand(out);
    scale_columns(out, vectors + 2 * 4 * kChunk);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(update);
    scale_rows(update, undo);
    pack<Dtype>(packed, update);
    scale_columns(update, vectors + 4 * kChunk);
    pack<Dtype>(packed_kept, update);
    gemm_rs<Dtype, kDim, 4>(state, packed_kept, Columns(tiles));
    gemm_rs<Dtype, 64, 4>(out, packed, Rows(record + offsetof(ChunkRecord, scores)));
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operand(state);
    pack<Dtype>(packed_state, state);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(out);
    store_out<Dtype>(problem, work, out, tile_v, row, column,
                     [&](int n, const uint32_t (&words)[4]) {
                       ptx::stmatrix_x4_trans(transposed(tile_v, n), words);
                     });
    release();
  }
  if (problem.final_state.data != nullptr) {
    each_of_state<kDim>(problem, problem.final_state, work, column,
                        [&](int i, float* to) { *to = state[i]; });
  }
}

// The grid: sequences times heads times tiles of columns of V, on one axis.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  FwdSmem<Config> const smem{smem_address(shared)};
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(smem.full(stage), 1);
      ptx::mbarrier_init(smem.empty(stage), 4 * Config::kWarpgroups);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // mbarriers are initialised
  Work const work(args.problem, args.column_tiles, Config::kColumns);
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x < 32 && ptx::elect_one()) fwd_produce<Config>(args, smem, work);
  } else {
    ptx::setmaxnreg_inc<240>();
    // The shuffle tells the compiler that the index is warp-uniform, so that descriptors are in
    // uniform registers.
    uint32_t const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
    fwd_consume<Config>(args, smem, work, static_cast<int>(warpgroup));
  }
}

}  // namespace flashvar::sm90::gated_delta_rule
