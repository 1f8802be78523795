// One of the two chains of the backward: recomputes the forward's and writes, instead of out, the
// state before each chunk and the residuals R (grad_chunk.h). For an inner segment it writes only
// the state after it, or the transition.
#pragma once
#include <cstdint>

#include <type_traits>

#include "gated_delta_rule/large_dim.h"
#include "ptx/vectors.cuh"
#include "sm90/gated_delta_rule/grad_chain_parts.cuh"

namespace flashvar::sm90::gated_delta_rule {

// kBlocks: blocks that share an SM. kWarpgroups: of a block, with 64 columns of V each.
template <class Target, class Dtype_, int kDim_, Extent kExtent_, int kBlocks, int kWarpgroups_>
struct StatesChain {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  static constexpr Extent kExtent = kExtent_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr bool kOutput = kExtent != Extent::kInner;
  using Segment = std::conditional_t<kOutput, SegmentWork, Pass1Work>;
  static constexpr int kColBlocks = kDim / 64;
  static constexpr int kStateBytes = kColBlocks * kTile64Bytes;
  // A stage: K, X o D, V; and the vectors, which lie after all stages.
  static constexpr int kSolution = kStateBytes;
  static constexpr int kV = kSolution + Triangle::kBytes;
  static constexpr int kStageBytes = kV + kWarpgroups * kTile64Bytes;
  static constexpr int kStages = kBlocks == 1 ? 3 : 2;
  // Staging of stores: the images of S^T and R^T, of each warpgroup.
  static constexpr int kState = kStages * kStageBytes;
  static constexpr int kResiduals = kState + kWarpgroups * kStateBytes;
  static constexpr int kVectors = kResiduals + kWarpgroups * kTile64Bytes;
  static constexpr int kBarriers = kVectors + kStages * kChainVectorBytes;
  static constexpr int kSharedMemory = kBarriers + kStages * 16;
  static_assert(kStageBytes % 1024 == 0 && kVectors % 1024 == 0, "swizzle periods");
  static_assert(kBlocks <= Target::blocks_that_fit(kSharedMemory));

  uint32_t base;
  uint32_t warpgroups;  // that have columns

  __device__ __forceinline__ uint32_t tiles(uint32_t stage) const {
    return base + stage * kStageBytes;
  }
  __device__ __forceinline__ uint32_t vectors(uint32_t stage) const {
    return base + kVectors + stage * kChainVectorBytes;
  }
  __device__ __forceinline__ BarrierPair operands(uint32_t stage) const {
    return {base + kBarriers + 16 * stage};
  }

  // Initializes the mbarriers; called by one thread.
  __device__ __forceinline__ void init() const {
    for (uint32_t i = 0; i < kStages; ++i) operands(i).init(1, kStateWarps * warpgroups);
    ptx::mbarrier_init_fence();
  }

  // Loads every chunk. Called by one lane.
  __device__ __forceinline__ void load(const GradLoads& from) const {
    const Work& work = from.work;
    PipelineState<kStages> stage;
    for (int32_t row = 0; row < work.span.count; row += kChunk, stage.advance()) {
      uint32_t const to = tiles(stage.stage());
      BarrierPair const barrier = operands(stage.stage());
      ptx::mbarrier_wait(barrier.empty(), stage.phase() ^ 1);  // the stage is released
      ptx::mbarrier_arrive_expect(barrier.full, (from.keys + from.values) * kTile64Bytes +
                                                    Triangle::kBytes + kChainVectorBytes);
      const GradRecord& record = from.record(row);
      from.rows.load(to, from.args.k, barrier.full, from.keys, 0, row, work.head_qk);
      from.rows.load(to + kV, from.args.v, barrier.full, from.values, work.column, row, work.head);
      ptx::bulk_load(to + kSolution, record.solution, Triangle::kBytes, barrier.full);
      ptx::bulk_load(vectors(stage.stage()), record.a, kChainVectorBytes, barrier.full);
    }
  }

  // A state warpgroup: carries the state of the columns of `work` through all chunks.
  __device__ __forceinline__ void run(const ChainArgs& args, const Segment& work,
                                      uint32_t warpgroup) const {
    const BwdProblem& problem = args.problem;
    const GradWorkspace& workspace = args.workspace;
    ImageStore<kColBlocks> const state_images{base + kState + warpgroup * kStateBytes};
    ImageStore<1> const residual_images{base + kResiduals + warpgroup * kTile64Bytes};

    float state[kDim / 2];
    if constexpr (kExtent == Extent::kSequence) {
      load_initial_state<kDim>(problem, work, work.column, state);
    } else if constexpr (kOutput) {
      load_first_state<kDim>(problem, args.grad_segments.between, work, work.column, state);
    } else {
      load_first_state<kDim>(problem, work, work.column, state);
    }
    PipelineState<kStages> stage;
    for (int32_t row = 0; row < work.span.count; row += kChunk, stage.advance()) {
      uint32_t const tile_k = tiles(stage.stage()), chunk_vectors = vectors(stage.stage());
      uint32_t const tile_v = tile_k + kV + warpgroup * kTile64Bytes;
      TileIndices const indices(problem, work, workspace.tiles, row);
      unsigned char* const image = workspace.residuals + indices.tile * kTile64Bytes;
      unsigned char* const image_low = workspace.residuals_low + indices.tile * kTile64Bytes;
      uint32_t packed_state[kDim / 16][4];
      pack<Dtype>(packed_state, state);
      if constexpr (kOutput) state_images.template put<1>(packed_state);
      ptx::mbarrier_wait(operands(stage.stage()).full, stage.phase());  // the chunk is loaded
      float const growth = ptx::shared_load_unordered<float>(chunk_vectors + Vectors::growth);
      if (growth > kMaxGradGrowth) {
        if constexpr (kOutput) state_images.send(indices.state(workspace));
        residuals_by_tokens<Dtype, kDim>(problem, work, state, tile_k, tile_v, row,
                                         [&](int token, int half, float x) {
                                           if constexpr (kOutput)
                                             put_element<Dtype>(image, token, half, x, image_low);
                                         });
        // An empty group in place of the residuals'.
        if (kOutput && threadIdx.x % 32 == 0) ptx::bulk_commit();
        warp_arrive(operands(stage.stage()).empty());
        continue;
      }
      float residual[32];
      if constexpr (kLargeDim<kDim>) {
        // From the image, because registers are scarce. The fence of send() orders each warp's
        // rows.
        static_assert(kOutput);
        state_images.send(indices.state(workspace));
        gemm_ss<Dtype, 64, kDim / 16>(residual, ColumnsAsK(state_images.staging),
                                      ColumnsAsK(tile_k));
      } else {
        gemm_rs<Dtype, 64, kDim / 16, ColumnsAsK, false>(residual, packed_state,
                                                         ColumnsAsK(tile_k));
        if constexpr (kOutput) state_images.send(indices.state(workspace));
      }
      ValueTile const values(tile_v);
      TokenFactors const a(chunk_vectors);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(residual);
      values.template subtract<Dtype>(residual, a);  // (S1)
      float const decay = ptx::shared_load_unordered<float>(chunk_vectors + Vectors::decay);
      // (S2); while its GEMM runs, the state is decayed (S3)
      solve<false>(residual, workspace.records[indices.record], tile_k + kSolution,
                   chunk_vectors + kVectorBeta, growth > kCarefulGrowth, kStateThreads * warpgroups,
                   [&] {
#pragma unroll
                     for (int i = 0; i < kDim / 2; ++i) state[i] *= decay;
                   });
      uint32_t packed[4][4];
      if constexpr (kOutput) {
        if (growth > kCarefulGrowth) {
          pack_low<Dtype>(packed, residual);
          store_image(image_low, packed);
        }
        pack<Dtype>(packed, residual);
        residual_images.template put<1>(packed);
      }
      TokenFactors(chunk_vectors + kVectorBeta).scale(residual);  // (S3)
      TokenFactors(chunk_vectors + Vectors::b).scale(residual);
      pack<Dtype>(packed, residual);
      gemm_rs<Dtype, kDim, 4>(state, packed, RowsAsK(tile_k));
      if constexpr (kOutput) residual_images.send(image);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(state);
      warp_arrive(operands(stage.stage()).empty());
    }
    if constexpr (kOutput) {
      if (kExtent == Extent::kSegment && work.before < 0) {
        store_state_after<kDim>(problem, args.grad_segments.between, work, work.column, state);
      }
      ptx::bulk_wait();  // images are stored: the block may exit
    } else {
      store_last_state<kDim>(problem, args.grad_segments.between, work, work.column, state);
      if (work.is_transition) {
        store_transposed<kDim>(problem, args.grad_segments.grads, work, work.column, state);
      }
    }
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
