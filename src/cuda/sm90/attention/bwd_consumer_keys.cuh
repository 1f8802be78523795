// Consumers of WorkSplit::kKeys: each of two warpgroups owns 64 keys and their dK and dV. With
// kGradQ each computes half of every dQ, from the dS of both, which goes through shared memory.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/attention/bwd_modifiers.cuh"
#include "sm90/attention/bwd_scores.cuh"
#include "sm90/attention/bwd_varlen.cuh"
#include "sm90/attention/key_tile.cuh"
#include "sm90/attention/query_iterator.cuh"

namespace flashvar::sm90::attention {

// One consumer warpgroup. Longer than a screen because its steps are closures over the accumulators
// and pipeline states, all of which are live in each: they read in the order in which they run.
template <class Config>
__device__ __forceinline__ void bwd_consume_keys(const BwdArgs& args,
                                                 const KeyTileSmem<Config>& smem,
                                                 uint32_t warpgroup) {
  using S = Scores<Config>;
  using ScoreState = PipelineState<Config::kScoreStages>;
  const BwdProblem& problem = args.problem;
  float const factor = problem.score_sign * problem.scale_log2;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  uint32_t const offset = warpgroup * 64 * 128;  // of the warpgroup's rows in a col_block
  for (KeyTiles<Config> tiles; tiles.has_tile(args, smem); tiles.advance(args, smem)) {
    const auto& tile = tiles.tile(args, smem);
    if (!tile.exists()) continue;
    if constexpr (Config::kVarlen) kv.count = tile.seen_before;  // saves a register
    int32_t const first_key = tile.first_key + warpgroup * 64;
    float rK[Config::kHeadDim / 2], rV[Config::kHeadDimV / 2];
    clear(rK);
    clear(rV);
    if (tile.seen()) {
      typename S::Registers rS;
      QueryIterator it(args, tile);
      auto start_scores = [&] {
        ptx::mbarrier_wait(smem.full_q(step.stage()), step.phase());
        multiply_scores<Config, Config::kHeadDim>(rS, smem.k() + offset, smem.q(step.stage()));
      };
      auto start_grad_q = [&](float (&rQ)[Config::kGradQCols / 2], const ScoreState& scores) {
        ptx::mbarrier_wait(smem.full_scores(scores.stage()), scores.phase());
        multiply_grad_q<Config>(rQ, smem.grad_scores(scores.stage()), smem.k(), warpgroup);
      };
      auto publish_ds = [&](const typename S::Packed& rdP, const ScoreState& scores) {
        // dQ from this buffer is complete
        ptx::mbarrier_wait(smem.empty_scores(scores.stage()), scores.phase() ^ 1);
        store_scores<Config>(smem.grad_scores(scores.stage()) + warpgroup * Config::kColBlockBytesQ,
                             rdP);
        ptx::fence_async_proxy();
        __syncwarp();
        if (first_lane) ptx::mbarrier_arrive(smem.full_scores(scores.stage()));
      };
      // Precondition: S(i) complete. wgmma groups in flight, in order: {dP(i)}, {dQ(i-1), dV(i)},
      // {dV(i), dK(i)}, {dK(i), S(i+1)}.
      auto take_step = [&](auto first, auto last) {
        uint32_t const s = step.stage();
        ScoreState const scores{step.count}, before{step.count - 1};
        typename S::Registers rdS;
        typename S::Packed rP, rdP;
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        multiply_scores<Config, Config::kHeadDimV>(rdS, smem.v() + offset, smem.grad_out(s));
        exponentiate<Config>(rS, factor, smem.lse(s), tile.mask, first_key, it.m * Config::kBlockQ);
        S::pack(rS, rP);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rdS);
        differentiate_all<Config>(rS, rdS, smem.delta(s));
        S::pack(rdS, rdP);
        publish_ds(rdP, scores);
        float rQ[Config::kGradQCols / 2];
        if constexpr (!first.value) start_grad_q(rQ, before);
        multiply_grad<Config, Config::kHeadDimV>(rV, rP, smem.grad_out(s));
        if constexpr (!first.value) {
          ptx::wgmma_wait<1>();
          ptx::wgmma_pin(rQ);
          if (first_lane) ptx::mbarrier_arrive(smem.empty_scores(before.stage()));
        }
        multiply_grad<Config, Config::kHeadDim>(rK, rdP, smem.q(s));
        if constexpr (!first.value) {
          add_grad_q<Config>(rQ, grad_q_part<Config>(args, it.before, warpgroup));
        }
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(rV);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));
        step.advance();
        it.advance(args);
        if constexpr (!last.value) start_scores();
        ptx::wgmma_wait<last.value ? 0 : 1>();
        ptx::wgmma_pin(rK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        if constexpr (!last.value) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(rS);
        }
      };
      // kSerial: no software pipelining, one copy of the code, since evaluating modifiers is long.
      // The tensor cores run the other warpgroup's GEMMs meanwhile.
      auto take_serial_step = [&] {
        uint32_t const s = step.stage(), head = it.number / args.query_tiles;
        int32_t const first_query = it.m * Config::kBlockQ;
        ScoreState const scores{step.count}, before{step.count - 1};
        typename S::Registers rdS;
        typename S::Packed rP, rdP;
        start_scores();
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        multiply_scores<Config, Config::kHeadDimV>(rdS, smem.v() + offset, smem.grad_out(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rS);
        ptx::wgmma_pin(rdS);
        if constexpr (Config::kModifiers) {
          differentiate_with_modifiers<Config>(rS, rdS, rP, rdP, problem, tile, head,
                                               ColumnValues(smem.lse(s)),
                                               ColumnValues(smem.delta(s)), first_key, first_query);
          mask_transposed<Config>(tile.mask, first_key, first_query, [&](int n, int half, int e) {
            S::clear(rP, n, half, e);
            S::clear(rdP, n, half, e);
          });
        } else {
          exponentiate<Config>(rS, factor, smem.lse(s), tile.mask, first_key, first_query);
          S::pack(rS, rP);
          differentiate_all<Config>(rS, rdS, smem.delta(s));
          S::pack(rdS, rdP);
        }
        bool const later = Config::kGradQ && it.before != it.kNone;
        float rQ[Config::kGradQCols / 2];
        if constexpr (Config::kGradQ) {
          publish_ds(rdP, scores);
          // In the first step the result is garbage and is not added.
          if (later) ptx::mbarrier_wait(smem.full_scores(before.stage()), before.phase());
          multiply_grad_q<Config>(rQ, smem.grad_scores(before.stage()), smem.k(), warpgroup);
        }
        multiply_grad<Config, Config::kHeadDimV>(rV, rP, smem.grad_out(s));
        multiply_grad<Config, Config::kHeadDim>(rK, rdP, smem.q(s));
        if constexpr (Config::kGradQ) {
          ptx::wgmma_wait<2>();
          ptx::wgmma_pin(rQ);
        }
        if (later) {
          if (first_lane) ptx::mbarrier_arrive(smem.empty_scores(before.stage()));
          add_grad_q<Config>(rQ, grad_q_part<Config>(args, it.before, warpgroup));
        }
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(rV);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        step.advance();
        it.advance(args);
      };
      ptx::mbarrier_wait(smem.full_k(), kv.phase());
      if constexpr (Config::kSerial) {
        ptx::mbarrier_wait(smem.full_v(), kv.phase());
        while (it.left > 0) take_serial_step();
      } else {
        start_scores();
        ptx::mbarrier_wait(smem.full_v(), kv.phase());
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rS);
        if (it.left == 1) {
          take_step(std::true_type{}, std::true_type{});
        } else {
          take_step(std::true_type{}, std::false_type{});
          while (it.left > 1) take_step(std::false_type{}, std::false_type{});
          take_step(std::false_type{}, std::true_type{});
        }
      }
      if constexpr (Config::kGradQ) {
        float rQ[Config::kGradQCols / 2];
        ScoreState const before{step.count - 1};
        start_grad_q(rQ, before);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rQ);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_scores(before.stage()));
        add_grad_q<Config>(rQ, grad_q_part<Config>(args, it.before, warpgroup));
      }
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());
      kv.advance();
    }
    store_grad<Config, Config::kHeadDimV>(problem.grad_v, tile.batch, tile.head_kv, tile.rows(), rV,
                                          grad_v_scale<Config>(problem), first_key,
                                          problem.head_dim_v);
    store_grad<Config, Config::kHeadDim>(problem.grad_k, tile.batch, tile.head_kv, tile.rows(), rK,
                                         problem.modifiers.scale, first_key, problem.head_dim);
  }
}

}  // namespace flashvar::sm90::attention
