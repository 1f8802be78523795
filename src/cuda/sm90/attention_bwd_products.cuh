// The backward's consumers of Sharing::kProducts: dK and dV of 64 keys would fill the registers of
// both warpgroups, so the first computes S and dV, the second dP and dK, and P goes from one to the
// other. dQ has a kernel of its own.
//
// Each starts the first product of the next step beside the second of this one. P has two buffers,
// so that the first is ahead by the time that its exponentials take, and one warpgroup's products
// run beside what the other makes of its scores.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "sm90/attention_bwd_consumer.cuh"
#include "sm90/attention_bwd_features.cuh"
#include "sm90/attention_bwd_pipeline.cuh"
#include "sm90/attention_bwd_ragged.cuh"
#include "sm90/attention_bwd_walk.cuh"

namespace flashvar::sm90 {

// Where a thread's P is in a buffer, and how far the next mma tile's is from one's.
__device__ __forceinline__ uint32_t own_weights(uint32_t buffer) {
  return buffer + ptx::thread_index() % 128 * 16;
}
inline constexpr uint32_t kWeightsStep = 128 * 16;

// The first warpgroup: S, P, dV.
template <class Config>
__device__ __forceinline__ void consume_values(const AttentionBwdArguments& arguments,
                                               const BwdSmem<Config>& smem) {
  using S = Scores<Config>;
  const AttentionBwdProblem& problem = arguments.problem;
  float const factor = problem.score_sign * problem.scale_log2;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (TileWalk<Config> tiles; tiles.left(arguments, smem); tiles.advance(arguments, smem)) {
    const auto& tile = tiles.tile(arguments, smem);
    if (!tile.exists()) continue;
    float rV[Config::kHeadDimV / 2];
    clear(rV);
    if (tile.seen()) {
      typename S::Registers rS;
      QueryWalk walk(arguments, tile);
      auto start_scores = [&] {
        ptx::mbarrier_wait(smem.full_q(step.stage()), step.phase());
        multiply_scores<Config, Config::kHeadDim>(rS, smem.k(), smem.q(step.stage()));
      };
      // S is there. In flight: dV, S of the next step.
      auto take_step = [&](auto last) {
        uint32_t const s = step.stage();
        int32_t const first_query = walk.m * Config::kBlockQ;
        PipelineState<Config::kScoreStages> const weights{step.count};
        typename S::Packed rP;
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        if constexpr (Config::kFeatures) {
          uint32_t const head = walk.number / arguments.query_tiles;
          weigh_features<Config>(rS, rP, problem, tile, head, ColumnValues(smem.lse(s)),
                                 tile.first_key, first_query);
          hide_keys<Config>(tile.mask, tile.first_key, first_query, [&](int n, int half, int e) {
            S::clear(rP, n, half, e);
            rS[4 * n + 2 * half + e] = 0.f;
          });
        } else {
          weigh<Config>(rS, factor, smem.lse(s), tile.mask, tile.first_key, first_query);
          S::pack(rS, rP);
        }
        // The other has read what was there before.
        ptx::mbarrier_wait(smem.empty_scores(weights.stage()), weights.phase() ^ 1);
        uint32_t const own = own_weights(smem.weights(weights.stage()));
#pragma unroll
        for (int n = 0; n < S::kColumns; ++n) {
          ptx::shared_store(own + n * kWeightsStep, rS[4 * n], rS[4 * n + 1], rS[4 * n + 2],
                            rS[4 * n + 3]);
        }
        ptx::mbarrier_arrive(smem.full_scores(weights.stage()));
        multiply_grad<Config, Config::kHeadDimV>(rV, rP, smem.grad_out(s));
        step.advance();
        walk.advance(arguments);
        if constexpr (!last.value) start_scores();
        ptx::wgmma_wait<last.value ? 0 : 1>();
        ptx::wgmma_pin(rV);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));
        if constexpr (!last.value) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(rS);
        }
      };
      ptx::mbarrier_wait(smem.full_k(), kv.phase());
      start_scores();
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(rS);
      while (walk.left > 1) take_step(std::false_type{});
      take_step(std::true_type{});
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());
      kv.advance();
    }
    store_grad<Config, Config::kHeadDimV>(problem.grad_v, tile.batch, tile.head_kv, tile.rows(), rV,
                                          grad_v_scale<Config>(problem), tile.first_key,
                                          problem.head_dim_v);
  }
}

// The second warpgroup: dP, dS, dK.
template <class Config>
__device__ __forceinline__ void consume_scores(const AttentionBwdArguments& arguments,
                                               const BwdSmem<Config>& smem) {
  using S = Scores<Config>;
  const AttentionBwdProblem& problem = arguments.problem;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (TileWalk<Config> tiles; tiles.left(arguments, smem); tiles.advance(arguments, smem)) {
    const auto& tile = tiles.tile(arguments, smem);
    if (!tile.exists()) continue;
    float rK[Config::kHeadDim / 2];
    clear(rK);
    if (tile.seen()) {
      typename S::Registers rdS;
      int32_t left = problem.group * (tile.end - tile.begin);
      auto start_grad_weights = [&] {
        ptx::mbarrier_wait(smem.full_grad_out(step.stage()), step.phase());
        multiply_scores<Config, Config::kHeadDimV>(rdS, smem.v(), smem.grad_out(step.stage()));
      };
      // dP is there. In flight: dK, dP of the next step.
      auto take_step = [&](auto last) {
        uint32_t const s = step.stage();
        PipelineState<Config::kScoreStages> const weights{step.count};
        typename S::Packed rdP;
        ptx::mbarrier_wait(smem.full_scores(weights.stage()), weights.phase());
        uint32_t const own = own_weights(smem.weights(weights.stage()));
#pragma unroll
        for (int n = 0; n < S::kColumns; ++n) {
          float4 const p = ptx::shared_load4(own + n * kWeightsStep);
          const float row[4] = {p.x, p.y, p.z, p.w};
          float2 const sums =
              ptx::shared_load2(smem.row_sums(s) + (n * 8 + ptx::thread_index() % 4 * 2) * 4);
          if (Config::kFeatures && problem.features.rng != nullptr) {
            differentiate_dropped<ColumnValues>(row, &rdS[4 * n], problem.features.dropout_scale,
                                                sums);
          } else {
            differentiate<ColumnValues>(row, &rdS[4 * n], sums);
          }
        }
        ptx::mbarrier_arrive(smem.empty_scores(weights.stage()));
        ptx::mbarrier_arrive(smem.empty_grad_out(s));
        S::pack(rdS, rdP);
        ptx::mbarrier_wait(smem.full_q(s), step.phase());
        multiply_grad<Config, Config::kHeadDim>(rK, rdP, smem.q(s));
        step.advance();
        --left;
        if constexpr (!last.value) start_grad_weights();
        ptx::wgmma_wait<last.value ? 0 : 1>();
        ptx::wgmma_pin(rK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        if constexpr (!last.value) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(rdS);
        }
      };
      ptx::mbarrier_wait(smem.full_v(), kv.phase());
      start_grad_weights();
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(rdS);
      while (left > 1) take_step(std::false_type{});
      take_step(std::true_type{});
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());
      kv.advance();
    }
    store_grad<Config, Config::kHeadDim>(problem.grad_k, tile.batch, tile.head_kv, tile.rows(), rK,
                                         problem.features.scale, tile.first_key, problem.head_dim);
  }
}

}  // namespace flashvar::sm90
