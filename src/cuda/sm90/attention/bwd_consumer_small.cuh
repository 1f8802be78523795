// The consumer of small tiles: one warpgroup, which owns 64 keys with their dK and dV, and computes
// dQ of each step. Steps are not pipelined: meanwhile the SM runs its other CTA.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/attention/bwd_dynamic.cuh"
#include "sm90/attention/bwd_grad_q.cuh"
#include "sm90/attention/bwd_modifiers.cuh"
#include "sm90/attention/bwd_scores.cuh"
#include "sm90/attention/bwd_sum.cuh"
#include "sm90/attention/key_tile.cuh"
#include "sm90/attention/query_iterator.cuh"

namespace flashvar::sm90::attention {

// One query block: adds to dK and dV, and computes dQ.
template <class Config, class Tile>
__device__ __forceinline__ void bwd_small_step(const BwdArgs& args, const KeyTileSmem<Config>& smem,
                                               const QueryIterator<Tile>& it,
                                               const PipelineState<Config::kStages>& step,
                                               float (&rdK)[Config::kHeadDim / 2],
                                               float (&rdV)[Config::kHeadDimV / 2]) {
  constexpr int kCols = Config::kGradQCols < 64 ? Config::kGradQCols : 64;  // of dQ, first
  constexpr int kRest = Config::kGradQCols - kCols;
  const BwdProblem& problem = args.problem;
  const Tile& tile = it.tile;
  uint32_t const s = step.stage(), head = it.number / args.query_tiles;
  uint32_t const ds = smem.ds(step.count % Config::kExchangeStages);
  int32_t const first_query = it.m * Config::kBlockQ;
  bool const first_lane = threadIdx.x % 32 == 0;
  BiasStage<Config> const bias{smem.bias(ptx::thread_index() / 32 % 4)};
  if constexpr (Config::kBias) {
    bias.load(problem, tile.batch, head, first_query,
              tile.first_key + ptx::thread_index() / 32 % 4 * 16);
  }
  typename Scores<Config>::Registers rS, rdP;
  typename Scores<Config>::Packed rP, rdS;
  ptx::mbarrier_wait(smem.full_q(s), step.phase());  // Q is loaded
  gemm_scores_t<Config, Config::kHeadDim>(rS, smem.k(), smem.q(s));
  ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());  // dO, LSE, delta are loaded
  gemm_scores_t<Config, Config::kHeadDimV>(rdP, smem.v(), smem.grad_out(s));
  if constexpr (Config::kModifiers) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(rS);
    ptx::wgmma_fence_operand(rdP);
    if constexpr (Config::kBias) bias.wait();
    differentiate_with_modifiers<Config>(rS, rdP, rP, rdS, problem, tile, head,
                                         ColumnValues(smem.lse(s)), ColumnValues(smem.delta(s)),
                                         tile.first_key, first_query, bias.smem);
    mask_transposed<Config>(tile.mask, tile.first_key, first_query, [&](int n, int half, int e) {
      Scores<Config>::clear(rP, n, half, e);
      Scores<Config>::clear(rdS, n, half, e);
    });
  } else {
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operand(rS);
    exponentiate<Config>(rS, problem.score_sign * problem.scale_log2, ColumnValues(smem.lse(s)),
                         tile.mask, tile.first_key, first_query);
    Scores<Config>::pack(rS, rP);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(rdP);
    differentiate_softmax<Config>(rS, rdP, ColumnValues(smem.delta(s)));
    Scores<Config>::pack(rdP, rdS);
  }
  // dQ of the step before the last read this buffer. It is complete in all warps, which have since
  // met at the barrier of the last step.
  store_ds<Config>(ds, rdS);
  ptx::fence_async_proxy();                  // dS is visible to wgmma
  ptx::named_barrier_sync(kDsWritten, 128);  // all warps have written dS
  gemm_grad_kv<Config, Config::kHeadDimV>(rdV, rP, smem.grad_out(s));
  gemm_grad_kv<Config, Config::kHeadDim>(rdK, rdS, smem.q(s));
  ptx::wgmma_wait<1>();
  ptx::wgmma_fence_operand(rdV);
  ptx::mbarrier_arrive(smem.empty_grad_out(s));  // dV has read dO
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(rdK);
  if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));  // dK has read Q
  auto compute_grad_q = [&](auto first, auto count) {
    constexpr int kFirst = first.value, kCols = count.value;
    float rdQ[kCols / 2];
    gemm_ss<typename Config::Dtype, kCols, Config::kBlockKV / 16>(
        rdQ, KMajor<Config::kColBlockBytesQ>(ds),
        MnMajor<Config::kColBlockBytesKV>(smem.k() +
                                          kFirst / kColBlockCols * Config::kColBlockBytesKV));
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(rdQ);
    put_grad_q<Config, kFirst, kCols>(args, tile, it.number, 0, rdQ);
  };
  compute_grad_q(std::integral_constant<int, 0>{}, std::integral_constant<int, kCols>{});
  if constexpr (kRest > 0) {
    compute_grad_q(std::integral_constant<int, kCols>{}, std::integral_constant<int, kRest>{});
  }
}

template <class Config>
__device__ __forceinline__ void bwd_consume_small(const BwdArgs& args,
                                                  const KeyTileSmem<Config>& smem) {
  const BwdProblem& problem = args.problem;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (KeyTiles<Config> tiles; tiles.has_tile(args, smem); tiles.advance(args, smem)) {
    const auto& tile = tiles.tile(args, smem);
    kv.count = tile.kv_loads;
    float rdK[Config::kHeadDim / 2], rdV[Config::kHeadDimV / 2];
    clear(rdK);
    clear(rdV);
    if (tile.has_queries()) {
      ptx::mbarrier_wait(smem.full_k(), kv.phase());  // K is loaded
      ptx::mbarrier_wait(smem.full_v(), kv.phase());  // V is loaded
      for (QueryIterator it(args, tile); it.left > 0; it.advance(args)) {
        bwd_small_step<Config>(args, smem, it, step, rdK, rdV);
        step.advance();
      }
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.empty_kv());  // K and V are read
    }
    store_key_grad<Config, Config::kHeadDimV>(args, problem.grad_v, args.splits.grad_v, tile, rdV,
                                              grad_v_scale<Config>(problem), tile.first_key,
                                              problem.head_dim_v);
    store_key_grad<Config, Config::kHeadDim>(args, problem.grad_k, args.splits.grad_k, tile, rdK,
                                             problem.modifiers.scale, tile.first_key,
                                             problem.head_dim);
  }
}

}  // namespace flashvar::sm90::attention
