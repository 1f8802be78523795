// One of the two chains of the backward: from the last chunk of a sequence to the first, with 64
// columns of the gradient of a head's state in registers, as in gated_delta_rule/chain.cuh:
//   dU^T = b o (dS^T K^T) + dOut^T P;  dV^T = beta o (dU^T - (beta o dU^T) (X o D))
//   dS^T = decay dS^T + (c o dOut^T) Q - (a o dV^T) K
// It writes dV, and dS^T after each chunk. The two GEMMs of dOut do not depend on dS, and are taken
// out of the sequential path: dOut^T P is computed during the chunk before, dOut^T Q while the
// first GEMM's results are processed.
#pragma once
#include <cstdint>

#include "sm90/gated_delta_rule/grad_chain.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype_, int kDim_>
struct ReverseChain {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  static constexpr int kColBlocks = kDim / 64;
  static constexpr int kTileBytes = kColBlocks * kSquareBytes;
  // A stage: K, X o D; and the vectors, which lie after all stages.
  static constexpr int kInverse = kTileBytes;
  static constexpr int kStageBytes = kInverse + kSquareBytes;
  static constexpr int kStages = 2;
  // Single buffers with mbarriers of their own: P, dOut and the chunk's growth; Q.
  static constexpr int kScores = kStages * kStageBytes;
  static constexpr int kGradOut = kScores + kSquareBytes;
  static constexpr int kQ = kGradOut + kSquareBytes;
  // Staging of stores: the image of dS^T, and dV.
  static constexpr int kGradState = kQ + kTileBytes;
  static constexpr int kGradValues = kGradState + kTileBytes;
  static constexpr int kVectors = kGradValues + kSquareBytes;
  static constexpr int kGrowth = kVectors + kStages * kChainVectorBytes;
  static constexpr int kGrowthBytes = 16;  // of the record: decay, growth
  static constexpr int kBarriers = kGrowth + kGrowthBytes;
  static constexpr int kSharedMemory = kBarriers + (kStages + 2) * 16;
  static_assert(kSharedMemory <= kHalfSharedMemory<Target>);

  uint32_t base;

  __device__ __forceinline__ uint32_t tiles(uint32_t stage) const {
    return base + stage * kStageBytes;
  }
  __device__ __forceinline__ uint32_t vectors(uint32_t stage) const {
    return base + kVectors + stage * kChainVectorBytes;
  }
  __device__ __forceinline__ Handover operands(uint32_t stage) const {
    return {base + kBarriers + 16 * stage};
  }
  __device__ __forceinline__ Handover out() const { return operands(kStages); }
  __device__ __forceinline__ Handover queries() const { return operands(kStages + 1); }

  // Initialises the mbarriers; called by one thread.
  __device__ __forceinline__ void init() const {
    for (uint32_t i = 0; i < kStages + 2; ++i) operands(i).init(1, kStateWarps);
    ptx::mbarrier_init_fence();
  }

  static __device__ __forceinline__ int32_t last_chunk(const Work& work) {
    return (work.span.count + kChunk - 1) / kChunk * kChunk - kChunk;
  }

  // Loads every chunk, last one first, in the order in which buffers are released. Called by one
  // lane.
  __device__ __forceinline__ void load(const GradLoads& from) const {
    const Work& work = from.work;
    PipelineState<kStages> stage;
    PipelineState<1> single;
    for (int32_t row = last_chunk(work); row >= 0;
         row -= kChunk, stage.advance(), single.advance()) {
      const GradRecord& record = from.record(row);
      ptx::mbarrier_wait(out().empty(), single.phase() ^ 1);  // dOut^T P has read both
      ptx::mbarrier_arrive_expect(out().full, 2 * kSquareBytes + kGrowthBytes);
      from.rows.load(base + kGradOut, from.args.grad_out, out().full, 1, work.column, row,
                     work.head);
      ptx::bulk_load(base + kScores, record.scores, kSquareBytes, out().full);
      ptx::bulk_load(base + kGrowth, &record.decay, kGrowthBytes, out().full);

      uint32_t const to = tiles(stage.stage());
      Handover const barrier = operands(stage.stage());
      ptx::mbarrier_wait(barrier.empty(), stage.phase() ^ 1);  // the stage is released
      ptx::mbarrier_arrive_expect(barrier.full, (from.keys + 1) * kSquareBytes + kChainVectorBytes);
      from.rows.load(to, from.args.k, barrier.full, from.keys, 0, row, work.head_qk);
      ptx::bulk_load(to + kInverse, record.inverse, kSquareBytes, barrier.full);
      ptx::bulk_load(vectors(stage.stage()), record.a, kChainVectorBytes, barrier.full);

      ptx::mbarrier_wait(queries().empty(), single.phase() ^ 1);  // dOut^T Q has read Q
      ptx::mbarrier_arrive_expect(queries().full, from.keys * kSquareBytes);
      from.rows.load(base + kQ, from.args.q, queries().full, from.keys, 0, row, work.head_qk);
    }
  }

  // Issues dOut^T P. Returns whether the chunk is computed token by token, for which dOut must
  // stay.
  __device__ __forceinline__ bool start_out(float (&of_out)[32],
                                            uint32_t (&packed_out)[4][4]) const {
    bool const by_tokens = load_float(base + kGrowth + 4) > kMostGradGrowth;
    load_transposed(packed_out, base + kGradOut);
    using Columns = MnMajor<kSquareBytes>;
    gemm_rs<Dtype, 64, 4, Columns, false>(of_out, packed_out, Columns(base + kScores));
    return by_tokens;
  }

  // Computes dOut^T P of a chunk with nothing to overlap it with.
  __device__ __forceinline__ bool make_out(float (&of_out)[32], uint32_t (&packed_out)[4][4],
                                           uint32_t phase) const {
    ptx::mbarrier_wait(out().full, phase);  // dOut is loaded
    bool const by_tokens = start_out(of_out, packed_out);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(of_out);
    if (!by_tokens) warp_arrive(out().empty());
    return by_tokens;
  }

  // Stores the transpose of operand A to the warp's 16 columns of the tile of dV.
  __device__ __forceinline__ void put_values(const uint32_t (&a)[4][4]) const {
    __syncwarp();  // all lanes have copied the last values out of the warp's columns
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      ptx::stmatrix_x4_trans(transposed(base + kGradValues, 2 * kk), a[kk]);
    }
  }

  // The state warpgroup: carries dS through all chunks. Over 100 lines, because its steps share the
  // accumulators of GEMMs that are in flight: as functions, steps change ptxas' register
  // allocation.
  __device__ __forceinline__ void follow(const ChainArgs& args, const Work& work) const {
    using Rows = KMajor<kSquareBytes>;      // K, columns are k
    using Columns = MnMajor<kSquareBytes>;  // K and Q, rows (tokens) are k
    const BwdProblem& problem = args.problem;
    const GradWorkspace& workspace = args.workspace;
    ImageStore<kColBlocks> const of_state{base + kGradState};
    uint32_t const tile_v = base + kGradValues;

    float grad[kDim / 2] = {};
    if (problem.grad_final_state.data != nullptr) {
      each_of_state<kDim>(problem, problem.grad_final_state, work, work.column,
                          [&](int i, const float* from) { grad[i] = *from; });
    }
    ptx::griddepcontrol_wait();  // prepare has written the records
    PipelineState<kStages> stage;
    PipelineState<1> single;
    float of_out[32];
    uint32_t packed_out[4][4];
    bool by_tokens = false;
    int32_t const last = last_chunk(work);
    if (last >= 0) {
      by_tokens = make_out(of_out, packed_out, 0);
    }
    for (int32_t row = last; row >= 0; row -= kChunk, stage.advance(), single.advance()) {
      uint32_t const tile_k = tiles(stage.stage()), of_tokens = vectors(stage.stage());
      TilePlace const place(problem, work, workspace.tiles, row);
      unsigned char* const image = workspace.grad_states + place.tile * workspace.state_bytes;
      auto const low = reinterpret_cast<uint16_t*>(workspace.grad_values_low) +
                       place.tile * (kChunk * kChainColumns);
      uint32_t packed_grad[kDim / 16][4];
      pack<Dtype>(packed_grad, grad);
      of_state.template put<0>(packed_grad);
      ptx::mbarrier_wait(operands(stage.stage()).full, stage.phase());  // all but Q is loaded
      if (by_tokens) {
        of_state.send(image);
        ptx::mbarrier_wait(queries().full, single.phase());  // Q is loaded
        gradients_by_tokens<Dtype, kDim>(problem, work, grad, tile_k, base + kQ, base + kGradOut,
                                         row, [&](int token, int half, float x) {
                                           put_grad_value<Dtype>(tile_v, token, half, x, low);
                                         });
        copy_out(problem, problem.grad_v, work, tile_v, row, work.column);
        warp_arrive(out().empty());
        warp_arrive(queries().empty());
        warp_arrive(operands(stage.stage()).empty());
        if (row > 0) by_tokens = make_out(of_out, packed_out, single.phase() ^ 1);
        continue;
      }
      float d[32];
      gemm_rs<Dtype, 64, kDim / 16, Rows, false>(d, packed_grad, Rows(tile_k));
      of_state.send(image);
      // While the GEMM runs: decay of the gradient, scaling of dOut.
      float const decay = load_float(of_tokens + Vectors::decay);
#pragma unroll
      for (float& value : grad) value *= decay;
      scale_operand<Dtype>(packed_out, of_tokens + Vectors::c);
      bool const careful = load_float(of_tokens + Vectors::growth) > kCarefulGrowth;
      TokenFactors const b(of_tokens + Vectors::b);
      ptx::mbarrier_wait(queries().full, single.phase());  // Q is loaded
      gemm_rs<Dtype, kDim, 4>(grad, packed_out, Columns(base + kQ));
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operand(d);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float2 const factor = b.pairs[i / 4];
        d[i] = fmaf(i % 2 == 0 ? factor.x : factor.y, d[i], of_out[i]);
      }
      solve<true>(d, workspace.records[place.record], tile_k + kInverse, of_tokens + kVectorBeta,
                  careful, [] {});
      ptx::wgmma_fence_operand(grad);
      warp_arrive(queries().empty());
      // Issue dOut^T P of the next chunk, to run during the arithmetic below. After the last one
      // its result is not read.
      bool const more = row > 0;
      if (more) ptx::mbarrier_wait(out().full, single.phase() ^ 1);  // the next dOut is loaded
      by_tokens = start_out(of_out, packed_out);
      TokenFactors(of_tokens + kVectorBeta).scale(d);
      uint32_t packed[4][4];
      if (careful) {
        pack_low<Dtype>(packed, d);
        put_values(packed);
        copy_columns(low, kChainColumns, tile_v, kChunk, kChainColumns);
      }
      pack<Dtype>(packed, d);
      put_values(packed);
      TokenFactors(of_tokens).scale(d);
#pragma unroll
      for (float& value : d) value = -value;
      pack<Dtype>(packed, d);
      gemm_rs<Dtype, kDim, 4>(grad, packed, Columns(tile_k));
      copy_out(problem, problem.grad_v, work, tile_v, row, work.column);
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operand(of_out);
      if (more && !by_tokens) warp_arrive(out().empty());
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(grad);
      warp_arrive(operands(stage.stage()).empty());
    }
    if (problem.grad_initial_state.data != nullptr) {
      each_of_state<kDim>(problem, problem.grad_initial_state, work, work.column,
                          [&](int i, float* to) { *to = grad[i]; });
    }
    ptx::bulk_wait();
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
