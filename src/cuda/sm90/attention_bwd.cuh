// Attention backward with wgmma and TMA (after FlashAttention-3: Shah et al., 2024).
//
// A block owns a tile of keys and walks the queries that see it. One thread of the producer
// warpgroup starts all copies. Two consumer warpgroups share the work in one of two ways (Sharing):
// up to head dim 128 each owns 64 keys; above, dK and dV of 64 keys fill the registers of both, so
// one computes S and dV, the other dP and dK, and P goes from the first to the second. Both compute
// half of every dQ, which is added to fp32 sums in the workspace. Blocks stay and walk over tiles.
#pragma once
#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/attention_bwd_consumer.cuh"
#include "sm90/attention_bwd_pipeline.cuh"

namespace flashvar::sm90 {

// Named barriers. kScores: dS is complete. kWeights: P is. kPart + i: consumer i's part of dQ is.
enum : uint32_t { kScores = 1, kWeights = 2, kPart = 3 };

// The caller has announced the bytes.
template <int kPages, int kPageBytes>
__device__ __forceinline__ void load_pages(uint32_t smem, const CUtensorMap* map, uint32_t full,
                                           int32_t row, uint32_t head, uint32_t batch) {
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    ptx::tma_load_4d(smem + page * kPageBytes, map, full, ptx::CacheHint::kEvictLast,
                     page * kPageCols, row, head, batch);
  }
}

// One thread: all copies of the block's tiles, in the order in which consumers want them.
template <class Config>
__device__ __forceinline__ void produce_bwd(const AttentionBwdArguments& arguments,
                                            const BwdSmem<Config>& smem) {
  const AttentionBwdProblem& problem = arguments.problem;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (BwdTurn turn; turn.item < arguments.items; turn.advance(arguments)) {
    KeyTile<Config> const tile(arguments, turn);
    if (!tile.exists() || !tile.seen()) continue;
    ptx::mbarrier_wait(smem.empty_kv(), kv.phase() ^ 1);  // the tile before is done with K and V
    kv.advance();
    ptx::mbarrier_arrive_expect(smem.full_k(), Config::kBytesKV);
    load_pages<Config::kPages, Config::kPageBytesKV>(smem.k(), &arguments.k, smem.full_k(),
                                                     tile.first_key, tile.head_kv, tile.batch);
    bool first = true;
    for (int32_t g = 0; g < problem.group; ++g) {
      uint32_t const head = tile.head_kv * problem.group + g;
      int64_t const rows = tile.query_tile(arguments, head, 0) * Config::kBlockQ;
      for (int32_t m = tile.begin; m < tile.end; ++m) {
        uint32_t const s = step.stage();
        int32_t const row = m * Config::kBlockQ;
        ptx::mbarrier_wait(smem.empty_q(s), step.phase() ^ 1);  // dK from this buffer is added
        ptx::mbarrier_arrive_expect(smem.full_q(s), Config::kBytesQ + Config::kRowBytes);
        load_pages<Config::kPages, Config::kPageBytesQ>(smem.q(s), &arguments.q, smem.full_q(s),
                                                        row, head, tile.batch);
        ptx::bulk_load(smem.lse(s), arguments.lse_log2 + rows + row, Config::kRowBytes,
                       smem.full_q(s));
        if (first) {
          ptx::mbarrier_arrive_expect(smem.full_v(), Config::kBytesKV);
          load_pages<Config::kPages, Config::kPageBytesKV>(
              smem.v(), &arguments.v, smem.full_v(), tile.first_key, tile.head_kv, tile.batch);
          first = false;
        }
        // dV from this buffer is added
        ptx::mbarrier_wait(smem.empty_grad_out(s), step.phase() ^ 1);
        ptx::mbarrier_arrive_expect(smem.full_grad_out(s), Config::kBytesQ + Config::kRowBytes);
        load_pages<Config::kPages, Config::kPageBytesQ>(
            smem.grad_out(s), &arguments.grad_out, smem.full_grad_out(s), row, head, tile.batch);
        ptx::bulk_load(smem.row_sums(s), arguments.row_sums + rows + row, Config::kRowBytes,
                       smem.full_grad_out(s));
        step.advance();
      }
    }
  }
}

// Calls step(head, m) for all blocks of queries that see a tile.
template <class Config, class Step>
__device__ __forceinline__ void for_each_step(const KeyTile<Config>& tile, int32_t group,
                                              Step&& step) {
  for (int32_t g = 0; g < group; ++g) {
    for (int32_t m = tile.begin; m < tile.end; ++m) step(tile.head_kv * group + g, m);
  }
}

template <class Config>
__device__ __forceinline__ float* grad_q_part(const AttentionBwdArguments& arguments,
                                              const KeyTile<Config>& tile, uint32_t head, int32_t m,
                                              uint32_t warpgroup) {
  return arguments.grad_q_sum +
         (tile.query_tile(arguments, head, m) * 2 + warpgroup) * Config::kGradQElements;
}

// Sharing::kKeys.
template <class Config>
__device__ __forceinline__ void consume_keys(const AttentionBwdArguments& arguments,
                                             const BwdSmem<Config>& smem, uint32_t warpgroup) {
  using S = Scores<Config>;
  const AttentionBwdProblem& problem = arguments.problem;
  float const factor = problem.score_sign * problem.scale_log2;
  bool const first_lane = threadIdx.x % 32 == 0;
  bool const first_thread = threadIdx.x % 128 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  uint32_t const offset = warpgroup * 64 * 128;  // of the warpgroup's rows in a page
  for (BwdTurn turn; turn.item < arguments.items; turn.advance(arguments)) {
    KeyTile<Config> const tile(arguments, turn);
    if (!tile.exists()) continue;
    int32_t const first_key = tile.first_key + warpgroup * 64;
    float rK[Config::kHeadDim / 2], rV[Config::kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) rK[i] = rV[i] = 0.f;
    if (tile.seen()) {
      ptx::mbarrier_wait(smem.full_k(), kv.phase());
      for_each_step(tile, problem.group, [&](uint32_t head, int32_t m) {
        uint32_t const s = step.stage(), buffer = step.count % Config::kScoreStages;
        typename S::Registers rS, rdS;
        typename S::Packed rP, rdP;
        ptx::mbarrier_wait(smem.full_q(s), step.phase());
        multiply_scores<Config>(rS, smem.k() + offset, smem.q(s));
        ptx::mbarrier_wait(smem.full_v(), kv.phase());
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        multiply_scores<Config>(rdS, smem.v() + offset, smem.grad_out(s));
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(rS);
        weigh<Config>(rS, factor, smem.lse(s), tile.mask, first_key, m * Config::kBlockQ);
        S::pack(rS, rP);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rdS);
#pragma unroll
        for (int n = 0; n < S::kColumns; ++n) {
          differentiate<Config>(
              &rS[4 * n], &rdS[4 * n],
              ptx::shared_load2(smem.row_sums(s) + (n * 8 + ptx::thread_index() % 4 * 2) * 4));
        }
        S::pack(rdS, rdP);
        multiply_grad<Config>(rV, rP, smem.grad_out(s));
        store_scores<Config>(smem.grad_scores(buffer) + warpgroup * Config::kPageBytesQ, rdP);
        ptx::fence_async_proxy();
        if (Config::kBulk && first_thread) ptx::bulk_wait_read();  // dQ's shared memory is free
        ptx::named_barrier_sync(kScores, 256);
        float rQ[Config::kGradQCols / 2];
        multiply_grad_q<Config>(rQ, smem.grad_scores(buffer), smem.k(), warpgroup);
        multiply_grad<Config>(rK, rdP, smem.q(s));
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(rV);
        ptx::wgmma_pin(rQ);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_grad_out(s));
        add_grad_q<Config>(rQ, grad_q_part<Config>(arguments, tile, head, m, warpgroup),
                           smem.grad_q(warpgroup), kPart + warpgroup);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        step.advance();
      });
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());
      kv.advance();
    }
    store_grad<Config>(problem.grad_v, tile, rV, 1.f, first_key, problem.head_dim_v);
    store_grad<Config>(problem.grad_k, tile, rK, problem.features.scale, first_key,
                       problem.head_dim);
  }
  if (Config::kBulk && first_thread) ptx::bulk_wait();
}

// Sharing::kProducts, the first warpgroup: S, P, dV.
template <class Config>
__device__ __forceinline__ void consume_values(const AttentionBwdArguments& arguments,
                                               const BwdSmem<Config>& smem) {
  using S = Scores<Config>;
  const AttentionBwdProblem& problem = arguments.problem;
  float const factor = problem.score_sign * problem.scale_log2;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (BwdTurn turn; turn.item < arguments.items; turn.advance(arguments)) {
    KeyTile<Config> const tile(arguments, turn);
    if (!tile.exists()) continue;
    float rV[Config::kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) rV[i] = 0.f;
    if (tile.seen()) {
      ptx::mbarrier_wait(smem.full_k(), kv.phase());
      for_each_step(tile, problem.group, [&](uint32_t head, int32_t m) {
        uint32_t const s = step.stage();
        typename S::Registers rS;
        typename S::Packed rP;
        ptx::mbarrier_wait(smem.full_q(s), step.phase());
        multiply_scores<Config>(rS, smem.k(), smem.q(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rS);
        weigh<Config>(rS, factor, smem.lse(s), tile.mask, tile.first_key, m * Config::kBlockQ);
        uint32_t const weights = smem.weights() + ptx::thread_index() % 128 * 16;
#pragma unroll
        for (int n = 0; n < S::kColumns; ++n) {
          ptx::shared_store(weights + n * 128 * 16, rS[4 * n], rS[4 * n + 1], rS[4 * n + 2],
                            rS[4 * n + 3]);
        }
        ptx::named_barrier_arrive(kWeights, 256);
        S::pack(rS, rP);
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        multiply_grad<Config>(rV, rP, smem.grad_out(s));
        ptx::named_barrier_sync(kScores, 256);  // also: the other has read P
        float rQ[Config::kGradQCols / 2];
        multiply_grad_q<Config>(rQ, smem.grad_scores(0), smem.k(), 0);
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(rV);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_grad_out(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rQ);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        add_grad_q<Config>(rQ, grad_q_part<Config>(arguments, tile, head, m, 0), smem.grad_q(0),
                           kPart);
        step.advance();
      });
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());
      kv.advance();
    }
    store_grad<Config>(problem.grad_v, tile, rV, 1.f, tile.first_key, problem.head_dim_v);
  }
}

// Sharing::kProducts, the second warpgroup: dP, dS, dK.
template <class Config>
__device__ __forceinline__ void consume_scores(const AttentionBwdArguments& arguments,
                                               const BwdSmem<Config>& smem) {
  using S = Scores<Config>;
  const AttentionBwdProblem& problem = arguments.problem;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (BwdTurn turn; turn.item < arguments.items; turn.advance(arguments)) {
    KeyTile<Config> const tile(arguments, turn);
    if (!tile.exists()) continue;
    float rK[Config::kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) rK[i] = 0.f;
    if (tile.seen()) {
      ptx::mbarrier_wait(smem.full_v(), kv.phase());
      for_each_step(tile, problem.group, [&](uint32_t head, int32_t m) {
        uint32_t const s = step.stage();
        typename S::Registers rdS;
        typename S::Packed rdP;
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        multiply_scores<Config>(rdS, smem.v(), smem.grad_out(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rdS);
        // Also: the other is done with dS of the step before, as it then starts the next S.
        ptx::named_barrier_sync(kWeights, 256);
        uint32_t const weights = smem.weights() + ptx::thread_index() % 128 * 16;
#pragma unroll
        for (int n = 0; n < S::kColumns; ++n) {
          float4 const p = ptx::shared_load4(weights + n * 128 * 16);
          const float row[4] = {p.x, p.y, p.z, p.w};
          differentiate<Config>(
              row, &rdS[4 * n],
              ptx::shared_load2(smem.row_sums(s) + (n * 8 + ptx::thread_index() % 4 * 2) * 4));
        }
        S::pack(rdS, rdP);
        store_scores<Config>(smem.grad_scores(0), rdP);
        ptx::fence_async_proxy();
        ptx::named_barrier_sync(kScores, 256);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_grad_out(s));
        float rQ[Config::kGradQCols / 2];
        multiply_grad_q<Config>(rQ, smem.grad_scores(0), smem.k(), 1);
        ptx::mbarrier_wait(smem.full_q(s), step.phase());
        multiply_grad<Config>(rK, rdP, smem.q(s));
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(rQ);
        add_grad_q<Config>(rQ, grad_q_part<Config>(arguments, tile, head, m, 1), smem.grad_q(1),
                           kPart + 1);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        step.advance();
      });
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());
      kv.advance();
    }
    store_grad<Config>(problem.grad_k, tile, rK, problem.features.scale, tile.first_key,
                       problem.head_dim);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_bwd_kernel(const __grid_constant__ AttentionBwdArguments arguments) {
  extern __shared__ __align__(1024) unsigned char shared[];
  BwdSmem<Config> const smem{smem_address(shared)};
  if (threadIdx.x == 0) {
    uint32_t const warps = 4 * Config::kConsumers;
    ptx::mbarrier_init(smem.full_k(), 1);
    ptx::mbarrier_init(smem.full_v(), 1);
    ptx::mbarrier_init(smem.empty_kv(), warps);
    for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(smem.full_q(stage), 1);
      ptx::mbarrier_init(smem.empty_q(stage), warps);
      ptx::mbarrier_init(smem.full_grad_out(stage), 1);
      ptx::mbarrier_init(smem.empty_grad_out(stage), warps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there for all
  if (threadIdx.x < 128) {
    ptx::registers_give<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce_bwd<Config>(arguments, smem);
  } else {
    ptx::registers_take<Config::kConsumerRegisters>();
    if constexpr (Config::kSharesKeys) {
      consume_keys<Config>(arguments, smem, threadIdx.x / 128 - 1);
    } else if (threadIdx.x < 256) {
      consume_values<Config>(arguments, smem);
    } else {
      consume_scores<Config>(arguments, smem);
    }
  }
}

// Rounds the sums of dQ into their tensor: one block per tile of queries and head.
template <class Config>
__global__ void __launch_bounds__(256)
    attention_bwd_round_kernel(const __grid_constant__ AttentionBwdArguments arguments) {
  const AttentionBwdProblem& problem = arguments.problem;
  uint32_t const tiles = (problem.queries.seqlen + Config::kBlockQ - 1) / Config::kBlockQ;
  uint32_t const head = blockIdx.x / arguments.query_tiles;
  uint32_t const batch = blockIdx.x % arguments.query_tiles / tiles;
  int32_t const first_row = blockIdx.x % arguments.query_tiles % tiles * Config::kBlockQ;
  uint32_t const warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const float* const from = arguments.grad_q_sum +
                            (int64_t{blockIdx.x} * 2 + warpgroup) * Config::kGradQElements +
                            thread * 4;
  const TensorView& tensor = problem.grad_q;
  uint16_t* const to = tensor.data + batch * tensor.batch_stride + head * tensor.head_stride;
  float const scale = problem.features.scale;
  int32_t const row =
      first_row + (Config::kSplitsRows ? warpgroup * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
  int const first_column = Config::kSplitsRows ? 0 : warpgroup * Config::kGradQCols;
#pragma unroll
  for (int n = 0; n < Config::kGradQCols / 8; n += 4) {
    uint32_t upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 const x = *reinterpret_cast<const float4*>(from + (n + i) * 128 * 4);
      upper[i] = Config::Dtype::pack(x.x * scale, x.y * scale);
      lower[i] = Config::Dtype::pack(x.z * scale, x.w * scale);
    }
    uint4 const chunks[2] = {transpose_quad(upper), transpose_quad(lower)};
    int const column = first_column + (n + thread % 4) * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 < problem.queries.seqlen && column < problem.head_dim) {
        *reinterpret_cast<uint4*>(to + (row + half * 8) * tensor.seq_stride + column) =
            chunks[half];
      }
    }
  }
}

}  // namespace flashvar::sm90
