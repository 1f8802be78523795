// Consumers of WorkSplit::kKeys: each of the two owns 64 keys and their dK and dV. With kGradQ each
// computes half of every dQ, from the dS of both, which goes through shared memory.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp_uniform.cuh"
#include "sm90/attention/bwd_dynamic.cuh"
#include "sm90/attention/bwd_grad_q.cuh"
#include "sm90/attention/bwd_modifiers.cuh"
#include "sm90/attention/bwd_scores.cuh"
#include "sm90/attention/bwd_sum.cuh"
#include "sm90/attention/key_tile.cuh"
#include "sm90/attention/query_iterator.cuh"

namespace flashvar::sm90::attention {

// One consumer warpgroup. Over 100 lines, because its steps are closures over the accumulators and
// pipeline states, all of which are live in each of them. They are written in the order in which
// they run.
template <class Config>
__device__ __forceinline__ void bwd_consume_keys(const BwdArgs& args, KeyTileSmem<Config> smem,
                                                 uint32_t warpgroup) {
  using ExchangeState = PipelineState<Config::kExchangeStages>;
  const BwdProblem& problem = args.problem;
  float const scale_log2 = problem.score_sign * problem.scale_log2;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  uint32_t const offset = warpgroup * 64 * 128;  // bytes, of the warpgroup's rows in a column block
  for (KeyTiles<Config> tiles; tiles.has_tile(args, smem); tiles.advance(args, smem)) {
    const auto& tile = tiles.tile(args, smem);
    if (!tile.exists()) continue;
    if constexpr (Config::kDynamic) kv.count = tile.kv_loads;  // saves a register
    int32_t const first_key = tile.first_key + warpgroup * 64;
    float rdK[Config::kHeadDim / 2], rdV[Config::kHeadDimV / 2];
    clear(rdK);
    clear(rdV);
    if (tile.has_queries()) {
      typename Scores<Config>::Registers rS;
      QueryIterator it(args, tile);
      auto bias_stage = [&] {
        uint32_t const warp = warpgroup * 4 + ptx::thread_index() / 32 % 4;
        return BiasStage<Config>{smem.bias(warp)};
      };
      // Starts to load the bias of the iterator's step.
      auto load_bias = [&] {
        bias_stage().load(problem, tile.batch, it.number / args.query_tiles, it.m * Config::kBlockQ,
                          first_key + ptx::thread_index() / 32 % 4 * 16);
      };
      auto start_scores = [&] {
        ptx::mbarrier_wait(smem.full_q(step.stage()), step.phase());  // Q is loaded
        gemm_scores_t<Config, Config::kHeadDim>(rS, smem.k() + offset, smem.q(step.stage()));
      };
      EarlyColumnValues<Config::kEarlyTiles> lse, delta;
      auto load_lse = [&] {
        // dO, LSE and delta are loaded.
        ptx::mbarrier_wait(smem.full_grad_out(step.stage()), step.phase());
        lse.load(smem.lse(step.stage()));
      };
      auto start_grad_q = [&](float (&rdQ)[Config::kGradQCols / 2], const ExchangeState& exchange) {
        // dS of both consumers is written.
        ptx::mbarrier_wait(smem.full_exchange(exchange.stage()), exchange.phase());
        gemm_grad_q_part<Config>(rdQ, smem.ds(exchange.stage()), smem.k(), warpgroup);
      };
      auto publish_ds = [&](const typename Scores<Config>::Packed& rdS,
                            const ExchangeState& exchange) {
        // dQ, for which both consumers read the dS that was in this buffer, is complete.
        ptx::mbarrier_wait(smem.empty_exchange(exchange.stage()), exchange.phase() ^ 1);
        store_ds<Config>(smem.ds(exchange.stage()) + warpgroup * Config::kColBlockBytesQ, rdS);
        ptx::fence_async_proxy();  // dS is visible to wgmma
        __syncwarp();              // all lanes have written dS
        if (first_lane) ptx::mbarrier_arrive(smem.full_exchange(exchange.stage()));
      };
      float* sums = grad_q_sums<Config>(args, it.number, warpgroup);  // of the next dQ
      // Step i, software pipelined. `first`, `last`: of the tile. Preconditions: S(i) is complete,
      // load_lse() has run, and `sums` is of the tile of dQ(i-1). The early part of LSE and delta
      // is read before the wait for the GEMM after which it is needed.
      //
      // wgmma groups in flight, in order:
      // {dP(i)}, {dQ(i-1), dV(i)}, {dV(i), dK(i)}, {dK(i), S(i+1)}.
      auto run_step = [&](auto first, auto last) {
        uint32_t const s = step.stage();
        ExchangeState const exchange{step.count}, previous{step.count - 1};
        typename Scores<Config>::Registers rdP;
        typename Scores<Config>::Packed rP, rdS;
        gemm_scores_t<Config, Config::kHeadDimV>(rdP, smem.v() + offset, smem.grad_out(s));
        exponentiate<Config>(rS, scale_log2, lse, tile.mask, first_key, it.m * Config::kBlockQ);
        Scores<Config>::pack(rS, rP);
        delta.load(smem.delta(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operand(rdP);
        differentiate_softmax<Config>(rS, rdP, delta);
        Scores<Config>::pack(rdP, rdS);
        publish_ds(rdS, exchange);
        float rdQ[Config::kGradQCols / 2];
        if constexpr (!first.value) start_grad_q(rdQ, previous);
        gemm_grad_kv<Config, Config::kHeadDimV>(rdV, rP, smem.grad_out(s));
        if constexpr (!first.value) {
          ptx::wgmma_wait<1>();
          ptx::wgmma_fence_operand(rdQ);
          // dQ has read dS.
          if (first_lane) ptx::mbarrier_arrive(smem.empty_exchange(previous.stage()));
        }
        gemm_grad_kv<Config, Config::kHeadDim>(rdK, rdS, smem.q(s));
        if constexpr (!first.value) {
          if constexpr (Config::kAddsGradQ) {
            add_grad_q<Config>(sums, rdQ);
          } else {
            put_grad_q<Config>(args, tile, it.previous, warpgroup, rdQ);
          }
        }
        ptx::wgmma_wait<1>();
        ptx::wgmma_fence_operand(rdV);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));  // dV has read dO
        step.advance();
        // Hides from the compiler that the base does not change. It would otherwise compute
        // descriptors ahead of the loop, for which there are no registers.
        step.count = ptx::warp_uniform(step.count);
        smem.base = ptx::warp_uniform(smem.base);
        uint32_t const added = it.previous;
        it.advance(args);
        if constexpr (!last.value) start_scores();
        ptx::wgmma_wait<last.value ? 0 : 1>();
        ptx::wgmma_fence_operand(rdK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));  // dK has read Q
        if constexpr (!last.value) {
          load_lse();
          if constexpr (Config::kAddsGradQ && !first.value) {
            // The launcher has checked that numbers of tiles fit 31 bits.
            move_grad_q_sums<Config>(sums, static_cast<int32_t>(it.previous - added));
          }
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_operand(rS);
        }
      };
      // kSerial: step i without software pipelining. Meanwhile the tensor cores run the other
      // consumer's GEMMs. The code has one instance, because that of modifiers is long.
      auto run_serial_step = [&] {
        uint32_t const s = step.stage(), head = it.number / args.query_tiles;
        int32_t const first_query = it.m * Config::kBlockQ;
        ExchangeState const exchange{step.count}, previous{step.count - 1};
        typename Scores<Config>::Registers rdP;
        typename Scores<Config>::Packed rP, rdS;
        start_scores();
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());  // dO, LSE, delta are loaded
        gemm_scores_t<Config, Config::kHeadDimV>(rdP, smem.v() + offset, smem.grad_out(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operand(rS);
        ptx::wgmma_fence_operand(rdP);
        if constexpr (Config::kBias) bias_stage().wait();
        if constexpr (Config::kModifiers) {
          differentiate_with_modifiers<Config>(
              rS, rdP, rP, rdS, problem, tile, head, ColumnValues(smem.lse(s)),
              ColumnValues(smem.delta(s)), first_key, first_query, bias_stage().smem);
          mask_transposed<Config>(tile.mask, first_key, first_query, [&](int n, int half, int e) {
            Scores<Config>::clear(rP, n, half, e);
            Scores<Config>::clear(rdS, n, half, e);
          });
        } else {
          exponentiate<Config>(rS, scale_log2, ColumnValues(smem.lse(s)), tile.mask, first_key,
                               first_query);
          Scores<Config>::pack(rS, rP);
          differentiate_softmax<Config>(rS, rdP, ColumnValues(smem.delta(s)));
          Scores<Config>::pack(rdP, rdS);
        }
        uint32_t const previous_tile = it.previous;  // whose dQ this step computes, or kNone
        bool const puts_dq = Config::kGradQ && previous_tile != it.kNone;
        float rdQ[Config::kGradQCols / 2];
        if constexpr (Config::kGradQ) {
          publish_ds(rdS, exchange);
          // dS of both consumers is written. In the tile's first step there is none yet: dQ is then
          // garbage, and is dropped.
          if (puts_dq) ptx::mbarrier_wait(smem.full_exchange(previous.stage()), previous.phase());
          gemm_grad_q_part<Config>(rdQ, smem.ds(previous.stage()), smem.k(), warpgroup);
        }
        gemm_grad_kv<Config, Config::kHeadDimV>(rdV, rP, smem.grad_out(s));
        gemm_grad_kv<Config, Config::kHeadDim>(rdK, rdS, smem.q(s));
        if constexpr (Config::kBias) {
          it.advance(args);
          if (it.left > 0) load_bias();
        }
        if constexpr (Config::kGradQ) {
          ptx::wgmma_wait<2>();
          ptx::wgmma_fence_operand(rdQ);
        }
        if (puts_dq) {
          // dQ has read dS.
          if (first_lane) ptx::mbarrier_arrive(smem.empty_exchange(previous.stage()));
          put_grad_q<Config>(args, tile, previous_tile, warpgroup, rdQ);
        }
        ptx::wgmma_wait<1>();
        ptx::wgmma_fence_operand(rdV);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));  // dV has read dO
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operand(rdK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));  // dK has read Q
        step.advance();
        if constexpr (Config::kBias) {
          smem.base = ptx::warp_uniform(smem.base);  // as in run_step
        } else {
          it.advance(args);
        }
      };
      if constexpr (Config::kBias) load_bias();
      ptx::mbarrier_wait(smem.full_k(), kv.phase());  // K is loaded
      if constexpr (Config::kSerial) {
        ptx::mbarrier_wait(smem.full_v(), kv.phase());  // V is loaded
        while (it.left > 0) run_serial_step();
      } else {
        start_scores();
        ptx::mbarrier_wait(smem.full_v(), kv.phase());  // V is loaded
        load_lse();
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operand(rS);
        if (it.left == 1) {
          run_step(std::true_type{}, std::true_type{});
        } else {
          run_step(std::true_type{}, std::false_type{});
          while (it.left > 1) run_step(std::false_type{}, std::false_type{});
          run_step(std::false_type{}, std::true_type{});
        }
      }
      if constexpr (Config::kGradQ) {  // dQ of the last step
        float rdQ[Config::kGradQCols / 2];
        ExchangeState const previous{step.count - 1};
        start_grad_q(rdQ, previous);
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operand(rdQ);
        // dQ has read dS.
        if (first_lane) ptx::mbarrier_arrive(smem.empty_exchange(previous.stage()));
        put_grad_q<Config>(args, tile, it.previous, warpgroup, rdQ);
      }
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());  // K and V are read
      kv.advance();
    }
    store_key_grad<Config, Config::kHeadDimV>(args, problem.grad_v, args.splits.grad_v, tile, rdV,
                                              grad_v_scale<Config>(problem), first_key,
                                              problem.head_dim_v);
    store_key_grad<Config, Config::kHeadDim>(args, problem.grad_k, args.splits.grad_k, tile, rdK,
                                             problem.modifiers.scale, first_key, problem.head_dim);
  }
}

}  // namespace flashvar::sm90::attention
