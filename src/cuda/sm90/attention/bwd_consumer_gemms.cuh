// Consumers of WorkSplit::kGemms. dK and dV of 64 keys do not fit one warpgroup's registers, so the
// first consumer computes S, P and dV, the second dP, dS and dK; P goes through shared memory. dQ
// has a kernel of its own.
//
// Each consumer issues the first GEMM of the next step together with the second GEMM of this step.
// P has two buffers (one with a bias above head dim 192). The first consumer can so run ahead by
// its softmax, and the GEMMs of one consumer overlap the element-wise work of the other.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "sm90/attention/bwd_dynamic.cuh"
#include "sm90/attention/bwd_modifiers.cuh"
#include "sm90/attention/bwd_scores.cuh"
#include "sm90/attention/bwd_sum.cuh"
#include "sm90/attention/key_tile.cuh"
#include "sm90/attention/query_iterator.cuh"

namespace flashvar::sm90::attention {

// Address of a thread's P in a buffer, and the distance in bytes to that of the next mma tile.
__device__ __forceinline__ uint32_t p_slot(uint32_t buffer) {
  return buffer + ptx::thread_index() % 128 * 16;
}
inline constexpr uint32_t kPStep = 128 * 16;

// The first consumer: S, P, dV.
template <class Config>
__device__ __forceinline__ void bwd_consume_dv(const BwdArgs& args,
                                               const KeyTileSmem<Config>& smem) {
  const BwdProblem& problem = args.problem;
  float const scale_log2 = problem.score_sign * problem.scale_log2;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (KeyTiles<Config> tiles; tiles.has_tile(args, smem); tiles.advance(args, smem)) {
    const auto& tile = tiles.tile(args, smem);
    if (!tile.exists()) continue;
    float rdV[Config::kHeadDimV / 2];
    clear(rdV);
    if (tile.has_queries()) {
      typename Scores<Config>::Registers rS;
      QueryIterator it(args, tile);
      BiasStage<Config> const bias{smem.bias(threadIdx.x / 32 % 4)};
      // Starts to load the bias, if any, of the iterator's step.
      auto load_bias = [&] {
        if constexpr (Config::kBias) {
          bias.load(problem, tile.batch, it.number / args.query_tiles, it.m * Config::kBlockQ,
                    tile.first_key + threadIdx.x / 32 % 4 * 16);
        }
      };
      auto start_scores = [&] {
        ptx::mbarrier_wait(smem.full_q(step.stage()), step.phase());  // Q is loaded
        gemm_scores_t<Config, Config::kHeadDim>(rS, smem.k(), smem.q(step.stage()));
      };
      // Step i. Precondition: S(i) complete. wgmma groups in flight: {dV(i), S(i+1)}.
      auto run_step = [&](auto last) {
        uint32_t const s = step.stage();
        int32_t const first_query = it.m * Config::kBlockQ;
        PipelineState<Config::kExchangeStages> const p{step.count};
        typename Scores<Config>::Packed rP;
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));    // S has read Q
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());  // dO and LSE are loaded
        if constexpr (Config::kBias) bias.wait();
        if constexpr (Config::kModifiers) {
          uint32_t const head = it.number / args.query_tiles;
          exponentiate_with_modifiers<Config>(rS, rP, problem, tile, head,
                                              ColumnValues(smem.lse(s)), tile.first_key,
                                              first_query, bias.smem);
          mask_transposed<Config>(tile.mask, tile.first_key, first_query,
                                  [&](int n, int half, int e) {
                                    Scores<Config>::clear(rP, n, half, e);
                                    rS[4 * n + 2 * half + e] = 0.f;
                                  });
        } else {
          exponentiate<Config>(rS, scale_log2, ColumnValues(smem.lse(s)), tile.mask, tile.first_key,
                               first_query);
          Scores<Config>::pack(rS, rP);
        }
        // The second consumer has read the P that was in this buffer.
        ptx::mbarrier_wait(smem.empty_exchange(p.stage()), p.phase() ^ 1);
        uint32_t const slot = p_slot(smem.p(p.stage()));
#pragma unroll
        for (int n = 0; n < Scores<Config>::kMmaCols; ++n) {
          ptx::shared_store(slot + n * kPStep, rS[4 * n], rS[4 * n + 1], rS[4 * n + 2],
                            rS[4 * n + 3]);
        }
        ptx::mbarrier_arrive(smem.full_exchange(p.stage()));  // P is written
        gemm_grad_kv<Config, Config::kHeadDimV>(rdV, rP, smem.grad_out(s));
        step.advance();
        it.advance(args);
        if constexpr (!last.value) load_bias();
        if constexpr (!last.value) start_scores();
        ptx::wgmma_wait<last.value ? 0 : 1>();
        ptx::wgmma_fence_operand(rdV);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));  // dV has read dO
        if constexpr (!last.value) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_operand(rS);
        }
      };
      load_bias();
      ptx::mbarrier_wait(smem.full_k(), kv.phase());  // K is loaded
      start_scores();
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(rS);
      while (it.left > 1) run_step(std::false_type{});
      run_step(std::true_type{});
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());  // K is read
      kv.advance();
    }
    store_key_grad<Config, Config::kHeadDimV>(args, problem.grad_v, args.splits.grad_v, tile, rdV,
                                              grad_v_scale<Config>(problem), tile.first_key,
                                              problem.head_dim_v);
  }
}

// The second consumer: dP, dS, dK.
template <class Config>
__device__ __forceinline__ void bwd_consume_dk(const BwdArgs& args,
                                               const KeyTileSmem<Config>& smem) {
  const BwdProblem& problem = args.problem;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (KeyTiles<Config> tiles; tiles.has_tile(args, smem); tiles.advance(args, smem)) {
    const auto& tile = tiles.tile(args, smem);
    if (!tile.exists()) continue;
    float rdK[Config::kHeadDim / 2];
    clear(rdK);
    if (tile.has_queries()) {
      typename Scores<Config>::Registers rdP;
      int32_t left = problem.group * (tile.end - tile.begin);
      auto start_dp = [&] {
        ptx::mbarrier_wait(smem.full_grad_out(step.stage()), step.phase());  // dO, delta are loaded
        gemm_scores_t<Config, Config::kHeadDimV>(rdP, smem.v(), smem.grad_out(step.stage()));
      };
      // Step i. Precondition: dP(i) complete. wgmma groups in flight: {dK(i), dP(i+1)}.
      auto run_step = [&](auto last) {
        uint32_t const s = step.stage();
        PipelineState<Config::kExchangeStages> const p{step.count};
        typename Scores<Config>::Packed rdS;
        ptx::mbarrier_wait(smem.full_exchange(p.stage()), p.phase());  // P is written
        uint32_t const slot = p_slot(smem.p(p.stage()));
#pragma unroll
        for (int n = 0; n < Scores<Config>::kMmaCols; ++n) {
          float4 const quad = ptx::shared_load4(slot + n * kPStep);
          const float row[4] = {quad.x, quad.y, quad.z, quad.w};
          float2 const sums =
              ptx::shared_load2(smem.delta(s) + (n * 8 + ptx::thread_index() % 4 * 2) * 4);
          if (Config::kModifiers && problem.modifiers.rng != nullptr) {
            differentiate_dropped<ColumnValues>(row, &rdP[4 * n], problem.modifiers.dropout_scale,
                                                sums);
          } else {
            differentiate_tile<ColumnValues>(row, &rdP[4 * n], sums);
          }
        }
        ptx::mbarrier_arrive(smem.empty_exchange(p.stage()));  // P is read
        ptx::mbarrier_arrive(smem.empty_grad_out(s));          // dO and delta are read
        Scores<Config>::pack(rdP, rdS);
        ptx::mbarrier_wait(smem.full_q(s), step.phase());  // Q is loaded
        gemm_grad_kv<Config, Config::kHeadDim>(rdK, rdS, smem.q(s));
        step.advance();
        --left;
        if constexpr (!last.value) start_dp();
        ptx::wgmma_wait<last.value ? 0 : 1>();
        ptx::wgmma_fence_operand(rdK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));  // dK has read Q
        if constexpr (!last.value) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_operand(rdP);
        }
      };
      ptx::mbarrier_wait(smem.full_v(), kv.phase());  // V is loaded
      start_dp();
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(rdP);
      while (left > 1) run_step(std::false_type{});
      run_step(std::true_type{});
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());  // V is read
      kv.advance();
    }
    store_key_grad<Config, Config::kHeadDim>(args, problem.grad_k, args.splits.grad_k, tile, rdK,
                                             problem.modifiers.scale, tile.first_key,
                                             problem.head_dim);
  }
}

}  // namespace flashvar::sm90::attention
