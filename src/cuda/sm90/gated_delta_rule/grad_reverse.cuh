// One of the two chains of the backward: from the last chunk of a sequence to the first, with 64
// columns of the gradient of a head's state in registers, as in gated_delta_rule/chain_parts.cuh.
// Its formulas, R1 to R6, are in gated_delta_rule/grad_chain_parts.cuh. It writes dV, and dS^T
// after each chunk; for an inner segment only dS^T before it. The two GEMMs of dOut do not depend
// on dS, and are taken out of the sequential path: dOut^T P is computed during the chunk before,
// dOut^T Q while the first GEMM's results are processed.
#pragma once
#include <cstdint>

#include "ptx/vectors.cuh"
#include "sm90/gated_delta_rule/grad_chain_parts.cuh"

namespace flashvar::sm90::gated_delta_rule {

// kBlocks: blocks that share an SM. kWarpgroups: of a block, with 64 columns of V each.
template <class Target, class Dtype_, int kDim_, Extent kExtent_, int kBlocks, int kWarpgroups_>
struct ReverseChain {
  using Dtype = Dtype_;
  using Segment = SegmentWork;
  static constexpr int kDim = kDim_;
  static constexpr Extent kExtent = kExtent_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr bool kOutput = kExtent != Extent::kInner;
  static constexpr int kColBlocks = kDim / 64;
  static constexpr int kTileBytes = kColBlocks * kTile64Bytes;
  // A stage: K, X o D; and the vectors, which lie after all stages.
  static constexpr int kSolution = kTileBytes;
  static constexpr int kStageBytes = kSolution + Triangle::kBytes;
  static constexpr int kStages = kBlocks == 1 && kDim <= 192 ? 3 : 2;
  // Buffers with mbarriers of their own, read at other times than a stage: Q; P, dOut and the
  // chunk's growth.
  static constexpr int kBuffers = kBlocks == 1 ? 2 : 1;
  static constexpr int kQ = kStages * kStageBytes;
  static constexpr int kScores = kQ + kBuffers * kTileBytes;
  static constexpr int kGradOut = kScores + kBuffers * Triangle::kBytes;
  // Staging of stores, where there are any: the image of dS^T, and dV, of each warpgroup.
  static constexpr int kGradState = kGradOut + kBuffers * kWarpgroups * kTile64Bytes;
  static constexpr int kGradValues = kGradState + kWarpgroups * kTileBytes;
  static constexpr int kVectors = kOutput ? kGradValues + kWarpgroups * kTile64Bytes : kGradState;
  static constexpr int kGrowth = kVectors + kStages * kChainVectorBytes;
  static constexpr int kGrowthBytes = 16;  // of the record: decay, growth, and two unused
  static_assert(offsetof(GradRecord, decay) % 16 == 0, "a bulk copy starts there");
  static constexpr int kBarriers = kGrowth + kBuffers * kGrowthBytes;
  static constexpr int kPairs = kStages + 2 * kBuffers;  // of mbarriers
  static constexpr int kSharedMemory = kBarriers + kPairs * 16;
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
  __device__ __forceinline__ uint32_t queries(uint32_t buffer) const {
    return base + kQ + buffer * kTileBytes;
  }
  __device__ __forceinline__ uint32_t scores(uint32_t buffer) const {
    return base + kScores + buffer * Triangle::kBytes;
  }
  __device__ __forceinline__ uint32_t grad_out(uint32_t buffer, uint32_t warpgroup) const {
    return base + kGradOut + (buffer * kWarpgroups + warpgroup) * kTile64Bytes;
  }
  __device__ __forceinline__ uint32_t growth(uint32_t buffer) const {
    return base + kGrowth + buffer * kGrowthBytes;
  }
  __device__ __forceinline__ BarrierPair out_barriers(uint32_t buffer) const {
    return operands(kStages + buffer);
  }
  __device__ __forceinline__ BarrierPair queries_barriers(uint32_t buffer) const {
    return operands(kStages + kBuffers + buffer);
  }

  // Initializes the mbarriers; called by one thread.
  __device__ __forceinline__ void init() const {
    for (uint32_t i = 0; i < kPairs; ++i) operands(i).init(1, kStateWarps * warpgroups);
    ptx::mbarrier_init_fence();
  }

  // Loads every chunk, last one first, in the order in which buffers are released. Called by one
  // lane.
  __device__ __forceinline__ void load(const GradLoads& from) const {
    const Work& work = from.work;
    PipelineState<kStages> stage;
    PipelineState<kBuffers> buffer;
    for (int32_t row = last_chunk(work); row >= 0;
         row -= kChunk, stage.advance(), buffer.advance()) {
      const GradRecord& record = from.record(row);
      uint32_t const at = buffer.stage();
      BarrierPair const out = out_barriers(at), q_barriers = queries_barriers(at);
      ptx::mbarrier_wait(out.empty(), buffer.phase() ^ 1);  // dOut^T P has read both
      ptx::mbarrier_arrive_expect(out.full,
                                  from.values * kTile64Bytes + Triangle::kBytes + kGrowthBytes);
      from.rows.load(grad_out(at, 0), from.args.grad_out, out.full, from.values, work.column, row,
                     work.head);
      ptx::bulk_load(scores(at), record.scores, Triangle::kBytes, out.full);
      ptx::bulk_load(growth(at), &record.decay, kGrowthBytes, out.full);

      uint32_t const to = tiles(stage.stage());
      BarrierPair const barrier = operands(stage.stage());
      ptx::mbarrier_wait(barrier.empty(), stage.phase() ^ 1);  // the stage is released
      ptx::mbarrier_arrive_expect(barrier.full,
                                  from.keys * kTile64Bytes + Triangle::kBytes + kChainVectorBytes);
      from.rows.load(to, from.args.k, barrier.full, from.keys, 0, row, work.head_qk);
      ptx::bulk_load(to + kSolution, record.solution, Triangle::kBytes, barrier.full);
      ptx::bulk_load(vectors(stage.stage()), record.a, kChainVectorBytes, barrier.full);

      ptx::mbarrier_wait(q_barriers.empty(), buffer.phase() ^ 1);  // dOut^T Q has read Q
      ptx::mbarrier_arrive_expect(q_barriers.full, from.keys * kTile64Bytes);
      from.rows.load(queries(at), from.args.q, q_barriers.full, from.keys, 0, row, work.head_qk);
    }
  }

  // Issues dOut^T P, for (R2). Returns whether the chunk is computed token by token, for which dOut
  // must stay.
  __device__ __forceinline__ bool start_out(uint32_t buffer, uint32_t warpgroup,
                                            float (&product)[32],
                                            uint32_t (&packed_out)[4][4]) const {
    bool const by_tokens = ptx::shared_load_unordered<float>(growth(buffer) + 4) > kMaxGradGrowth;
    load_transposed(packed_out, grad_out(buffer, warpgroup));
    gemm_triangle<Dtype, true, false>(product, packed_out, scores(buffer));
    return by_tokens;
  }

  // Computes dOut^T P of a chunk with nothing to overlap it with.
  __device__ __forceinline__ bool make_out(const PipelineState<kBuffers>& buffer,
                                           uint32_t warpgroup, float (&product)[32],
                                           uint32_t (&packed_out)[4][4]) const {
    BarrierPair const out = out_barriers(buffer.stage());
    ptx::mbarrier_wait(out.full, buffer.phase());  // dOut is loaded
    bool const by_tokens = start_out(buffer.stage(), warpgroup, product, packed_out);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(product);
    if (!by_tokens) warp_arrive(out.empty());
    return by_tokens;
  }

  // Stores the transpose of operand A to the warp's 16 columns of the tile of dV.
  static __device__ __forceinline__ void put_values(uint32_t tile, const uint32_t (&a)[4][4]) {
    __syncwarp();  // all lanes have copied the last values out of the warp's columns
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      ptx::stmatrix_x4_trans(transposed_address(tile, 2 * kk), a[kk]);
    }
  }

  // Writes dV^T to the tile of dV, and in careful chunks its low part, staged through the tile, to
  // the workspace.
  static __device__ __forceinline__ void stage_values(uint32_t tile, const float (&d)[32],
                                                      bool careful, uint16_t* low) {
    uint32_t packed[4][4];
    if (careful) {
      pack_low<Dtype>(packed, d);
      put_values(tile, packed);
      copy_columns(low, kChainColumns, tile, kChunk, kChainColumns);
    }
    pack<Dtype>(packed, d);
    put_values(tile, packed);
  }

  // A state warpgroup: carries dS of the columns of `work` through all chunks. Longer than a
  // screen: its steps share the accumulators of GEMMs that are in flight. If only the computation
  // token by token is made a function, the compiler already emits other code for the whole loop.
  __device__ __forceinline__ void run(const ChainArgs& args, const SegmentWork& work,
                                      uint32_t warpgroup) const {
    const BwdProblem& problem = args.problem;
    const GradWorkspace& workspace = args.workspace;
    ImageStore<kColBlocks> const images{base + kGradState + warpgroup * kTileBytes};
    uint32_t const tile_v = base + kGradValues + warpgroup * kTile64Bytes;

    float grad[kDim / 2];
    load_last_gradient<kDim, kExtent>(args, work, grad);
    PipelineState<kStages> stage;
    PipelineState<kBuffers> own, next;  // of this chunk, and of the next one
    float out_product[32];
    uint32_t packed_out[4][4];
    bool by_tokens = false;
    int32_t const last = last_chunk(work);
    if (last >= 0) {
      by_tokens = make_out(own, warpgroup, out_product, packed_out);
    }
    for (int32_t row = last; row >= 0; row -= kChunk, stage.advance(), own.advance()) {
      next.advance();
      uint32_t const at = own.stage();
      BarrierPair const next_out = out_barriers(next.stage());
      uint32_t const tile_k = tiles(stage.stage()), chunk_vectors = vectors(stage.stage());
      TileIndices const indices(problem, work, workspace.tiles, row);
      unsigned char* const image = indices.grad_state(workspace);
      uint16_t* const low = indices.grad_values_low(workspace);
      uint32_t packed_grad[kDim / 16][4];
      pack<Dtype>(packed_grad, grad);
      if constexpr (kOutput) images.template put<0>(packed_grad);
      ptx::mbarrier_wait(operands(stage.stage()).full, stage.phase());  // all but Q is loaded
      if (by_tokens) {
        if constexpr (kOutput) images.send(image);
        ptx::mbarrier_wait(queries_barriers(at).full, own.phase());  // Q is loaded
        gradients_by_tokens<Dtype, kDim>(problem, work, grad, tile_k, queries(at),
                                         grad_out(at, warpgroup), row,
                                         [&](int token, int half, float x) {
                                           if constexpr (kOutput)
                                             put_grad_value<Dtype>(tile_v, token, half, x, low);
                                         });
        if constexpr (kOutput) copy_out(problem, problem.grad_v, work, tile_v, row, work.column);
        warp_arrive(out_barriers(at).empty());
        warp_arrive(queries_barriers(at).empty());
        warp_arrive(operands(stage.stage()).empty());
        if (row > 0) by_tokens = make_out(next, warpgroup, out_product, packed_out);
        continue;
      }
      float d[32];
      gemm_rs<Dtype, 64, kDim / 16, ColumnsAsK, false>(d, packed_grad, ColumnsAsK(tile_k));  // (R1)
      if constexpr (kOutput) images.send(image);
      // While the GEMM runs: decay of the gradient, scaling of dOut.
      float const decay = ptx::shared_load_unordered<float>(chunk_vectors + Vectors::decay);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) grad[i] *= decay;  // (R4)
      scale_operand<Dtype>(packed_out, chunk_vectors + Vectors::c);
      bool const careful =
          ptx::shared_load_unordered<float>(chunk_vectors + Vectors::growth) > kCarefulGrowth;
      TokenFactors const b(chunk_vectors + Vectors::b);
      ptx::mbarrier_wait(queries_barriers(at).full, own.phase());       // Q is loaded
      gemm_rs<Dtype, kDim, 4>(grad, packed_out, RowsAsK(queries(at)));  // (R5)
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operand(d);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float2 const factor = b.pairs[i / 4];
        d[i] = fmaf(i % 2 == 0 ? factor.x : factor.y, d[i], out_product[i]);  // (R2)
      }
      // (R3)
      solve<true>(d, workspace.records[indices.record], tile_k + kSolution,
                  chunk_vectors + kVectorBeta, careful, kStateThreads * warpgroups, [] {});
      ptx::wgmma_fence_operand(grad);
      warp_arrive(queries_barriers(at).empty());
      // Issue dOut^T P of the next chunk, to run during the arithmetic below. After the last one
      // its result is not read.
      bool const more = row > 0;
      if (more) ptx::mbarrier_wait(next_out.full, next.phase());  // the next dOut is loaded
      by_tokens = start_out(next.stage(), warpgroup, out_product, packed_out);
      TokenFactors(chunk_vectors + kVectorBeta).scale(d);
      uint32_t packed[4][4];
      if constexpr (kOutput) stage_values(tile_v, d, careful, low);
      pack_removed<Dtype>(packed, d, chunk_vectors);
      gemm_rs<Dtype, kDim, 4>(grad, packed, RowsAsK(tile_k));  // (R6)
      if constexpr (kOutput) copy_out(problem, problem.grad_v, work, tile_v, row, work.column);
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operand(out_product);
      if (more && !by_tokens) warp_arrive(next_out.empty());
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(grad);
      warp_arrive(operands(stage.stage()).empty());
    }
    store_first_gradient<kDim, kExtent>(args, work, grad);
    if constexpr (kOutput) ptx::bulk_wait();  // images are stored: the block may exit
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
