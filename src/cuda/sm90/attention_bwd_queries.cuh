// dQ by itself, for the deterministic mode and for head dims above 128: a block owns 128 queries of
// one head and walks the keys that they see, and nobody else adds to its rows.
//
// The order of tiles and of copies is the forward's, with dO beside Q. Two consumer warpgroups of
// 64 queries each compute S and dP together, then dS, and dQ += dS K, while the other's products
// run.
#pragma once
#include <cstdint>

#include "core/mask.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/attention_bwd_config.cuh"
#include "sm90/attention_bwd_consumer.cuh"
#include "sm90/attention_bwd_features.cuh"
#include "sm90/query_tiles.cuh"

namespace flashvar::sm90 {

struct AttentionBwdQueriesArguments : QueryItems {
  AttentionBwdProblem problem;
  CUtensorMap q, k, v, grad_out;
  const float* lse_log2;  // as of AttentionBwdArguments
  const float* row_sums;
  int32_t query_tiles;  // of kRowsPerTile queries, of one head, over all batches
};

// One warp: all copies of the block's tiles, in the order in which consumers want them.
template <class Config>
__device__ __forceinline__ void produce_bwd_queries(const AttentionBwdQueriesArguments& arguments,
                                                    const Smem<Config>& smem) {
  const AttentionBwdProblem& problem = arguments.problem;
  PipelineState<1> q;
  PipelineState<Config::kStages> k;
  PipelineState<Config::kStagesV> v;
  for (Place place = Place::receive(smem, 0); place.exists();
       place = Place::receive(smem, q.count)) {
    Tile<Config> const tile(arguments, place);
    // Packed sequences share one batch index; their rows begin where their offsets say.
    uint32_t const batch_q = problem.queries.offsets == nullptr ? tile.batch : 0;
    uint32_t const batch_k = problem.keys.offsets == nullptr ? tile.batch : 0;
    ptx::mbarrier_wait(smem.empty_q(), q.phase() ^ 1);  // the tile before is done with Q and dO
    q.advance();
    if (!tile.sees()) {
      Place::want_next(smem);
      if (threadIdx.x < 2) ptx::mbarrier_arrive(smem.full_q());
      continue;
    }
    int32_t const row_q = tile.row_q + tile.first_query;
    load_rows<Config::kPages, Config::kPageBytesQ>(smem.q(), &arguments.q, smem.full_q(),
                                                   ptx::CacheHint::kEvictFirst, row_q, tile.head,
                                                   batch_q);
    load_rows<Config::kPagesV, Config::kPageBytesQ>(
        smem.q() + Config::kGradOutAt, &arguments.grad_out, smem.full_q(),
        ptx::CacheHint::kEvictFirst, row_q, tile.head, batch_q);
    // Found earlier, the next tile might be one that another block would start sooner.
    int32_t const soon = min(tile.begin + Config::kBlocksAhead, tile.end - 1);
    for (int32_t n = tile.end - 1; n >= tile.begin; --n) {
      if (n == soon) Place::want_next(smem);
      int32_t const row_k = tile.row_k + n * Config::kBlockKV;
      ptx::mbarrier_wait(smem.empty_k(k.stage()), k.phase() ^ 1);  // dQ from this buffer is added
      load_rows<Config::kPages, Config::kPageBytesKV>(
          smem.k(k.stage()), &arguments.k, smem.full_k(k.stage()), ptx::CacheHint::kEvictLast,
          row_k, tile.head_kv, batch_k);
      k.advance();
      ptx::mbarrier_wait(smem.empty_v(v.stage()),
                         v.phase() ^ 1);  // dP from this buffer is computed
      load_rows<Config::kPagesV, Config::kPageBytesKV>(
          smem.v(v.stage()), &arguments.v, smem.full_v(v.stage()), ptx::CacheHint::kEvictLast,
          row_k, tile.head_kv, batch_k);
      v.advance();
    }
  }
}

// LSE and D of the thread's two queries. Those past the sequence's end have no weights.
template <class Config>
__device__ __forceinline__ void read_row_values(const AttentionBwdQueriesArguments& arguments,
                                                const Tile<Config>& tile, int32_t first_query,
                                                RowValues& lse, RowValues& row_sums) {
  uint32_t const thread = ptx::thread_index();
  int32_t const row = first_query + thread / 32 % 4 * 16 + thread % 32 / 4;
  int64_t const first = (int64_t{tile.head} * arguments.query_tiles +
                         arguments.problem.queries.first_tile(tile.batch, Config::kRowsPerTile)) *
                        Config::kRowsPerTile;
  auto read = [&](const float* values, int32_t i, float otherwise) {
    return i < tile.mask.seqlen_q ? values[first + i] : otherwise;
  };
  lse.values = {read(arguments.lse_log2, row, infinity()),
                read(arguments.lse_log2, row + 8, infinity())};
  row_sums.values = {read(arguments.row_sums, row, 0.f), read(arguments.row_sums, row + 8, 0.f)};
}

// Starts scores = rows keys^T: Q with K, or dO with V.
template <class Config, int kDim>
__device__ __forceinline__ void multiply_rows(typename Scores<Config>::Registers& scores,
                                              uint32_t rows, uint32_t keys) {
  uint64_t const a = ptx::wgmma_descriptor(rows, 0), b = ptx::wgmma_descriptor(keys, 0);
  ptx::wgmma_pin(scores);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kDim / 16; ++kk) {
    uint32_t const page = kk / 4, column = kk % 4 * 32;
    ptx::Wgmma<typename Config::Dtype, Config::kBlockKV>::template ss<false>(
        scores, ptx::wgmma_advance(a, page * Config::kPageBytesQ + column),
        ptx::wgmma_advance(b, page * Config::kPageBytesKV + column), kk > 0);
  }
  ptx::wgmma_commit();
}

// Starts dQ += dS K.
template <class Config>
__device__ __forceinline__ void multiply_keys(float (&grad)[Config::kHeadDim / 2],
                                              const typename Scores<Config>::Packed& scores,
                                              uint32_t keys) {
  uint64_t const k = ptx::wgmma_descriptor(keys, Config::kPageBytesKV);
  ptx::wgmma_pin(grad);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < Scores<Config>::kSteps; ++kk) {
    ptx::Wgmma<typename Config::Dtype, Config::kHeadDim>::template rs<true>(
        grad, scores[kk], ptx::wgmma_advance(k, kk * 16 * 128), 1);
  }
  ptx::wgmma_commit();
}

// Clears packed scores of keys that the mask hides.
template <class Config>
__device__ __forceinline__ void hide_columns(typename Scores<Config>::Packed& packed,
                                             const Mask& mask, int32_t first_query,
                                             int32_t first_key) {
  if (!mask.hides_any(first_query, first_query + 63, first_key, first_key + Config::kBlockKV)) {
    return;
  }
  uint32_t const thread = ptx::thread_index();
  int32_t const own = first_key + static_cast<int32_t>(thread % 4 * 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int32_t const row = first_query + thread / 32 % 4 * 16 + half * 8 + thread % 32 / 4;
    int32_t const begin = mask.visible_begin(row) - own, end = mask.visible_end(row) - own;
#pragma unroll
    for (int n = 0; n < Scores<Config>::kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const column = 8 * n + e;
        if (column < begin || column >= end) Scores<Config>::clear(packed, n, half, e);
      }
    }
  }
}

// One warpgroup: dQ of its 64 rows of every tile.
template <class Config>
__device__ __forceinline__ void consume_bwd_queries(const AttentionBwdQueriesArguments& arguments,
                                                    const Smem<Config>& smem, uint32_t warpgroup) {
  using S = Scores<Config>;
  const AttentionBwdProblem& problem = arguments.problem;
  float const factor = problem.score_sign * problem.scale_log2;
  bool const tail = problem.keys.offsets != nullptr || problem.seqused_k != nullptr;
  PipelineState<1> q;
  PipelineState<Config::kStages> k;
  PipelineState<Config::kStagesV> v;
  auto release = [&](uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  };
  for (Place place = Place::receive(smem, 0); place.exists();
       place = Place::receive(smem, q.count)) {
    Place::want_next(smem);
    Tile<Config> const tile(arguments, place);
    int32_t const first_query = tile.first_query + warpgroup * 64;
    RowValues lse, row_sums;
    read_row_values<Config>(arguments, tile, first_query, lse, row_sums);
    float rQ[Config::kHeadDim / 2];
    clear(rQ);
    ptx::mbarrier_wait(smem.full_q(), q.phase());
    q.advance();
    if (!tile.sees()) release(smem.empty_q());
    uint32_t const sQ = smem.q() + warpgroup * 64 * 128, sGradOut = sQ + Config::kGradOutAt;
    bool const zeroes = tail && tile.mask.seqlen_k < tile.end * Config::kBlockKV;
    for (int32_t n = tile.end - 1; n >= tile.begin; --n) {
      int32_t const first_key = n * Config::kBlockKV;
      typename S::Registers rS, rdS;
      typename S::Packed rP, rdP;
      ptx::mbarrier_wait(smem.full_k(k.stage()), k.phase());
      if (zeroes && n == tile.end - 1) {
        zero_rows<Config, Config::kPages>(smem.k(k.stage()), tile.mask.seqlen_k - first_key);
      }
      multiply_rows<Config, Config::kHeadDim>(rS, sQ, smem.k(k.stage()));
      ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());
      multiply_rows<Config, Config::kHeadDimV>(rdS, sGradOut, smem.v(v.stage()));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(rS);
      ptx::wgmma_pin(rdS);
      release(smem.empty_v(v.stage()));
      v.advance();
      if (n == tile.begin) release(smem.empty_q());
      if constexpr (Config::kFeatures) {
        evaluate_features<Config>(rS, rdS, rP, rdP, problem, tile, tile.head, lse, row_sums,
                                  first_key, first_query);
      } else {
#pragma unroll
        for (int i = 0; i < 4 * S::kColumns; ++i) {
          rS[i] = exp2_approx(rS[i] * factor - (i / 2 % 2 == 0 ? lse.values.x : lse.values.y));
        }
#pragma unroll
        for (int j = 0; j < S::kColumns; ++j) {
          differentiate<RowValues>(&rS[4 * j], &rdS[4 * j], row_sums.values);
        }
        S::pack(rdS, rdP);
      }
      hide_columns<Config>(rdP, tile.mask, first_query, first_key);
      multiply_keys<Config>(rQ, rdP, smem.k(k.stage()));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(rQ);
      release(smem.empty_k(k.stage()));
      k.advance();
    }
    store_grad<Config, Config::kHeadDim>(problem.grad_q, tile.batch, tile.head,
                                         {tile.row_q, tile.mask.seqlen_q}, rQ,
                                         problem.features.scale, first_query, problem.head_dim);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_bwd_queries_kernel(const __grid_constant__ AttentionBwdQueriesArguments arguments) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Smem<Config> const smem{smem_address(shared)};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.full_q(), 2);  // Q, and dO
    ptx::mbarrier_init(smem.empty_q(), 4 * Config::kConsumers);
    ptx::mbarrier_init(smem.full_place(), 1);
    ptx::mbarrier_init(smem.empty_place(), 32 + 128 * Config::kConsumers);
    for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(smem.full_k(stage), 1);
      ptx::mbarrier_init(smem.full_v(stage), 1);
      ptx::mbarrier_init(smem.empty_k(stage), 4 * Config::kConsumers);
      ptx::mbarrier_init(smem.empty_v(stage), 4 * Config::kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  ptx::await_last_grid();  // LSE and D are there, and the counter is 0
  __syncthreads();         // the barriers are there for all
  if (threadIdx.x < 128) {
    ptx::registers_give<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      produce_bwd_queries<Config>(arguments, smem);
    } else if (threadIdx.x < 64) {
      find_query_tiles<Config>(arguments, smem);
    }
  } else {
    ptx::registers_take<Config::kConsumerRegisters>();
    // The same in all lanes, and shown to be: descriptors then live in uniform registers.
    consume_bwd_queries<Config>(arguments, smem,
                                __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0));
  }
}

}  // namespace flashvar::sm90
