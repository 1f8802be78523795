// dQ in a kernel of its own, for head dims above 128, and for the deterministic mode where key
// tiles do not store dQ (bwd_grad_q.cuh). A CTA owns 128 queries of one head and iterates over the
// keys visible to them; no other CTA adds to its rows.
//
// Scheduler, pipeline and load order are those of the forward, with dO beside Q. Each of two
// consumer warpgroups owns 64 queries. It computes S and dP, then dS, then dQ += dS K; meanwhile
// the other's GEMMs run.
#pragma once
#include <cstdint>

#include "attention/mask.cuh"
#include "core/math.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp_uniform.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/attention/bwd_config.cuh"
#include "sm90/attention/bwd_modifiers.cuh"
#include "sm90/attention/bwd_scores.cuh"
#include "sm90/attention/query_tile.cuh"

namespace flashvar::sm90::attention {

struct BwdDqArgs : QueryScheduler {
  BwdProblem problem;
  CUtensorMap q, k, v, grad_out;
  const float* lse_log2;  // as in BwdArgs
  const float* delta;
  int32_t query_tiles;  // tiles of kPaddedBlockQ queries, per head, over all batches
};

// The load warp: issues all TMA loads, in the order in which consumers need them.
template <class Config>
__device__ __forceinline__ void dq_produce(const BwdDqArgs& args,
                                           const QueryTileSmem<Config>& smem) {
  const BwdProblem& problem = args.problem;
  PipelineState<1> q;
  PipelineState<Config::kStages> k;
  PipelineState<Config::kStagesV> v;
  for (WorkTile work_tile = WorkTile::receive(smem, 0); work_tile.exists();
       work_tile = WorkTile::receive(smem, q.count)) {
    QueryTile<Config> const tile(args, work_tile);
    // Varlen tensors have one batch index, 0; sequences start at their offsets.
    uint32_t const batch_q = problem.queries.offsets == nullptr ? tile.batch : 0;
    uint32_t const batch_k = problem.keys.offsets == nullptr ? tile.batch : 0;
    // The previous tile has released Q and dO.
    ptx::mbarrier_wait(smem.empty_q(), q.phase() ^ 1);
    q.advance();
    if (!tile.has_keys()) {
      WorkTile::release(smem);
      if (threadIdx.x < 2) ptx::mbarrier_arrive(smem.full_q());  // in place of loads of Q and dO
      continue;
    }
    int32_t const row_q = tile.row_q + tile.first_query;
    load_tile<Config::kColBlocks, Config::kColBlockBytesQ>(
        smem.q(), &args.q, smem.full_q(), ptx::CacheHint::kEvictFirst, row_q, tile.head, batch_q);
    load_tile<Config::kColBlocksV, Config::kColBlockBytesQ>(
        smem.q() + Config::kGradOutOffset, &args.grad_out, smem.full_q(),
        ptx::CacheHint::kEvictFirst, row_q, tile.head, batch_q);
    int32_t const release_at = tile.release_at();
    for (int32_t n = tile.end - 1; n >= tile.begin; --n) {
      if (n == release_at) WorkTile::release(smem);
      int32_t const row_k = tile.row_k + n * Config::kBlockKV;
      // dQ, which read this stage, is complete.
      ptx::mbarrier_wait(smem.empty_k(k.stage()), k.phase() ^ 1);
      load_tile<Config::kColBlocks, Config::kColBlockBytesKV>(
          smem.k(k.stage()), &args.k, smem.full_k(k.stage()), ptx::CacheHint::kEvictLast, row_k,
          tile.head_kv, batch_k);
      k.advance();
      // dP, which read this stage, is complete.
      ptx::mbarrier_wait(smem.empty_v(v.stage()), v.phase() ^ 1);
      load_tile<Config::kColBlocksV, Config::kColBlockBytesKV>(
          smem.v(v.stage()), &args.v, smem.full_v(v.stage()), ptx::CacheHint::kEvictLast, row_k,
          tile.head_kv, batch_k);
      v.advance();
    }
  }
}

// Reads LSE and delta of the thread's two queries. Past the sequence's end the LSE is +inf, so that
// P is 0.
template <class Config>
__device__ __forceinline__ void read_row_values(const BwdDqArgs& args,
                                                const QueryTile<Config>& tile, int32_t first_query,
                                                RowValues& lse, RowValues& delta) {
  uint32_t const thread = ptx::thread_index();
  int32_t const row = first_query + thread / 32 % 4 * 16 + thread % 32 / 4;
  int64_t const first = (int64_t{tile.head} * args.query_tiles +
                         args.problem.queries.first_tile(tile.batch, Config::kPaddedBlockQ)) *
                        Config::kPaddedBlockQ;
  auto read = [&](const float* values, int32_t i, float otherwise) {
    return i < tile.mask.seqlen_q ? values[first + i] : otherwise;
  };
  lse.values = {read(args.lse_log2, row, infinity()), read(args.lse_log2, row + 8, infinity())};
  delta.values = {read(args.delta, row, 0.f), read(args.delta, row + 8, 0.f)};
}

// Issues S = Q K^T, or dP = dO V^T.
template <class Config, int kDim>
__device__ __forceinline__ void gemm_scores(typename Scores<Config>::Registers& scores,
                                            uint32_t rows, uint32_t keys) {
  gemm_ss<typename Config::Dtype, Config::kBlockKV, kDim / 16>(
      scores, KMajor<Config::kColBlockBytesQ>(rows), KMajor<Config::kColBlockBytesKV>(keys));
}

// Issues dQ += dS K.
template <class Config>
__device__ __forceinline__ void gemm_grad_q(float (&grad)[Config::kHeadDim / 2],
                                            const typename Scores<Config>::Packed& ds,
                                            uint32_t keys) {
  gemm_rs<typename Config::Dtype, Config::kHeadDim>(grad, ds,
                                                    MnMajor<Config::kColBlockBytesKV>(keys));
}

// Zeros packed scores of hidden keys; rows are queries.
template <class Config>
__device__ __forceinline__ void apply_mask(typename Scores<Config>::Packed& packed,
                                           const Mask& mask, int32_t first_query,
                                           int32_t first_key) {
  if (!mask.hides_any(first_query, first_query + 63, first_key, first_key + Config::kBlockKV)) {
    return;
  }
  uint32_t const thread = ptx::thread_index();
  int32_t const first_column = first_key + static_cast<int32_t>(thread % 4 * 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int32_t const row = first_query + thread / 32 % 4 * 16 + half * 8 + thread % 32 / 4;
    int32_t const begin = mask.key_begin(row) - first_column,
                  end = mask.key_end(row) - first_column;
    hide_scores<Scores<Config>::kMmaCols>(half, begin, end, [&](int n, int half, int e) {
      Scores<Config>::clear(packed, n, half, e);
    });
  }
}

// One consumer warpgroup: dQ of its 64 rows of every tile of the CTA.
template <class Config>
__device__ __forceinline__ void dq_consume(const BwdDqArgs& args, const QueryTileSmem<Config>& smem,
                                           uint32_t warpgroup) {
  const BwdProblem& problem = args.problem;
  float const scale_log2 = problem.score_sign * problem.scale_log2;
  bool const foreign_tail = problem.has_foreign_tail();
  PipelineState<1> q;
  PipelineState<Config::kStages> k;
  PipelineState<Config::kStagesV> v;
  auto release = [&](uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  };
  for (WorkTile work_tile = WorkTile::receive(smem, 0); work_tile.exists();
       work_tile = WorkTile::receive(smem, q.count)) {
    WorkTile::release(smem);
    QueryTile<Config> const tile(args, work_tile);
    int32_t const first_query = tile.first_query + warpgroup * 64;
    RowValues lse, delta;
    read_row_values<Config>(args, tile, first_query, lse, delta);
    float rdQ[Config::kHeadDim / 2];
    clear(rdQ);
    ptx::mbarrier_wait(smem.full_q(), q.phase());  // Q and dO are loaded
    q.advance();
    if (!tile.has_keys()) release(smem.empty_q());
    uint32_t const sQ = smem.q() + warpgroup * 64 * 128, sGradOut = sQ + Config::kGradOutOffset;
    bool const zero_tail = foreign_tail && tile.mask.seqlen_k < tile.end * Config::kBlockKV;
    uint32_t const warp = warpgroup * 4 + threadIdx.x / 32 % 4;
    // Starts to load the bias of key block n.
    auto load_bias = [&](int32_t n) {
      BiasStage<Config>{smem.bias(warp)}.load(problem, tile.batch, tile.head,
                                              tile.first_query + warp * 16, n * Config::kBlockKV);
    };
    if (Config::kBias && tile.has_keys()) load_bias(tile.end - 1);
    for (int32_t n = tile.end - 1; n >= tile.begin; --n) {
      int32_t const first_key = n * Config::kBlockKV;
      typename Scores<Config>::Registers rS, rdP;
      typename Scores<Config>::Packed rP, rdS;
      ptx::mbarrier_wait(smem.full_k(k.stage()), k.phase());  // K(n) is loaded
      if (zero_tail && n == tile.end - 1) {
        zero_rows<Config, Config::kColBlocks>(smem.k(k.stage()), tile.mask.seqlen_k - first_key);
      }
      gemm_scores<Config, Config::kHeadDim>(rS, sQ, smem.k(k.stage()));
      ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());  // V(n) is loaded
      gemm_scores<Config, Config::kHeadDimV>(rdP, sGradOut, smem.v(v.stage()));
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(rS);
      ptx::wgmma_fence_operand(rdP);
      release(smem.empty_v(v.stage()));
      v.advance();
      if (n == tile.begin) release(smem.empty_q());
      if constexpr (Config::kModifiers) {
        if constexpr (Config::kBias) BiasStage<Config>{smem.bias(warp)}.wait();
        differentiate_with_modifiers<Config>(rS, rdP, rP, rdS, problem, tile, tile.head, lse, delta,
                                             first_key, first_query, smem.bias(warp));
        if (Config::kBias && n > tile.begin) load_bias(n - 1);
      } else {
#pragma unroll
        for (int i = 0; i < 4 * Scores<Config>::kMmaCols; ++i) {
          rS[i] = exp2_approx(rS[i] * scale_log2 - (i / 2 % 2 == 0 ? lse.values.x : lse.values.y));
        }
#pragma unroll
        for (int j = 0; j < Scores<Config>::kMmaCols; ++j) {
          differentiate_tile<RowValues>(&rS[4 * j], &rdP[4 * j], delta.values);
        }
        Scores<Config>::pack(rdP, rdS);
      }
      apply_mask<Config>(rdS, tile.mask, first_query, first_key);
      gemm_grad_q<Config>(rdQ, rdS, smem.k(k.stage()));
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(rdQ);
      release(smem.empty_k(k.stage()));
      k.advance();
    }
    store_grad<Config, Config::kHeadDim>(problem.grad_q, tile.batch, tile.head,
                                         {tile.row_q, tile.mask.seqlen_q}, rdQ,
                                         problem.modifiers.scale, first_query, problem.head_dim);
  }
}

// The dQ kernel.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    bwd_dq_kernel(const __grid_constant__ BwdDqArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  QueryTileSmem<Config> const smem{ptx::smem_address(shared)};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.full_q(), 2);  // Q and dO
    ptx::mbarrier_init(smem.empty_q(), 4 * Config::kConsumers);
    ptx::mbarrier_init(smem.full_work_tile(), 1);
    ptx::mbarrier_init(smem.empty_work_tile(), 32 + 128 * Config::kConsumers);
    for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(smem.full_k(stage), 1);
      ptx::mbarrier_init(smem.full_v(stage), 1);
      ptx::mbarrier_init(smem.empty_k(stage), 4 * Config::kConsumers);
      ptx::mbarrier_init(smem.empty_v(stage), 4 * Config::kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  // The kernels before this one are complete: LSE and delta are written, the counter is zeroed.
  ptx::griddepcontrol_wait();
  __syncthreads();  // mbarriers are initialized
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      dq_produce<Config>(args, smem);
    } else if (threadIdx.x < 64) {
      schedule_query_tiles<Config>(args, smem);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    dq_consume<Config>(args, smem, ptx::warp_uniform(threadIdx.x / 128 - 1));
  }
}

}  // namespace flashvar::sm90::attention
