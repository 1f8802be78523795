// The reverse chain of the backward for head dims above 128: ReverseChain of whole sequences with
// fewer operands in registers, most of which hold dS. dS^T K^T reads dS^T from the image that is
// staged for the workspace, and dOut^T P is computed in the chunk itself.
#pragma once
#include <cstdint>

#include "ptx/vectors.cuh"
#include "sm90/gated_delta_rule/grad_reverse.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype_, int kDim_>
struct LargeDimReverseChain : ReverseChain<Target, Dtype_, kDim_, Extent::kSequence, 1, 1> {
  using Base = ReverseChain<Target, Dtype_, kDim_, Extent::kSequence, 1, 1>;
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;

  // As ReverseChain's, and longer than a screen for the same reason. With decay_state() the
  // compiler would put dS into memory.
  __device__ __forceinline__ void run(const ChainArgs& args, const SegmentWork& work,
                                      uint32_t /* warpgroup: the only one */) const {
    const BwdProblem& problem = args.problem;
    const GradWorkspace& workspace = args.workspace;
    ImageStore<Base::kColBlocks> const images{this->base + Base::kGradState};
    uint32_t const tile_v = this->base + Base::kGradValues;

    float grad[kDim / 2];
    load_last_gradient<kDim, Extent::kSequence>(args, work, grad);
    PipelineState<Base::kStages> stage;
    PipelineState<Base::kBuffers> buffer;
    for (int32_t row = last_chunk(work); row >= 0;
         row -= kChunk, stage.advance(), buffer.advance()) {
      uint32_t const at = buffer.stage();
      uint32_t const tile_k = this->tiles(stage.stage()),
                     chunk_vectors = this->vectors(stage.stage());
      uint32_t const tile_out = this->grad_out(at, 0);
      BarrierPair const operands = this->operands(stage.stage()), out = this->out_barriers(at);
      BarrierPair const q_barriers = this->queries_barriers(at);
      TileIndices const indices(problem, work, workspace.tiles, row);
      unsigned char* const image = indices.grad_state(workspace);
      uint16_t* const low = indices.grad_values_low(workspace);
      {
        uint32_t packed_grad[kDim / 16][4];
        pack<Dtype>(packed_grad, grad);
        images.template put<0>(packed_grad);
      }
      images.send(image);  // its fence orders the image before wgmma, each warp's own rows
      ptx::mbarrier_wait(out.full, buffer.phase());      // dOut and P are loaded
      ptx::mbarrier_wait(operands.full, stage.phase());  // all but Q is loaded
      float const growth = ptx::shared_load_unordered<float>(chunk_vectors + Vectors::growth);
      if (growth > kMaxGradGrowth) {
        ptx::mbarrier_wait(q_barriers.full, buffer.phase());  // Q is loaded
        gradients_by_tokens<Dtype, kDim>(problem, work, grad, tile_k, this->queries(at), tile_out,
                                         row, [&](int token, int half, float x) {
                                           put_grad_value<Dtype>(tile_v, token, half, x, low);
                                         });
        copy_out(problem, problem.grad_v, work, tile_v, row, work.column);
        warp_arrive(out.empty());
        warp_arrive(q_barriers.empty());
        warp_arrive(operands.empty());
        continue;
      }
      float d[32], out_product[32];
      uint32_t packed_out[4][4];
      load_transposed(packed_out, tile_out);
      gemm_triangle<Dtype, true, false>(out_product, packed_out, this->scores(at));
      gemm_ss<Dtype, 64, kDim / 16>(d, ColumnsAsK(images.staging), ColumnsAsK(tile_k));  // (R1)
      // While the GEMMs run: decay of the gradient, then scaling of dOut.
      float const decay = ptx::shared_load_unordered<float>(chunk_vectors + Vectors::decay);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) grad[i] *= decay;  // (R4)
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operand(out_product);
      warp_arrive(out.empty());
      scale_operand<Dtype>(packed_out, chunk_vectors + Vectors::c);
      ptx::mbarrier_wait(q_barriers.full, buffer.phase());                    // Q is loaded
      gemm_rs<Dtype, kDim, 4>(grad, packed_out, RowsAsK(this->queries(at)));  // (R5)
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operand(d);
      TokenFactors(chunk_vectors + Vectors::b).scale(d);  // (R2)
#pragma unroll
      for (int i = 0; i < 32; ++i) d[i] += out_product[i];
      bool const careful = growth > kCarefulGrowth;
      // (R3)
      solve<true>(d, workspace.records[indices.record], tile_k + Base::kSolution,
                  chunk_vectors + kVectorBeta, careful, kStateThreads, [] {});
      ptx::wgmma_fence_operand(grad);
      warp_arrive(q_barriers.empty());
      TokenFactors(chunk_vectors + kVectorBeta).scale(d);
      uint32_t packed[4][4];
      Base::stage_values(tile_v, d, careful, low);
      pack_removed<Dtype>(packed, d, chunk_vectors);
      gemm_rs<Dtype, kDim, 4>(grad, packed, RowsAsK(tile_k));  // (R6)
      copy_out(problem, problem.grad_v, work, tile_v, row, work.column);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(grad);
      warp_arrive(operands.empty());
    }
    store_first_gradient<kDim, Extent::kSequence>(args, work, grad);
    ptx::bulk_wait();  // images are stored: the block may exit
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
