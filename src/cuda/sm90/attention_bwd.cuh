// Attention backward with wgmma and TMA (after FlashAttention-3: Shah et al., 2024).
//
// A block owns a tile of keys and walks the queries that see it. A thread of the producer
// warpgroup, or two, starts all copies. Two consumer warpgroups share the work in one of two ways
// (Sharing). dQ is added to fp32 sums in the workspace, or has a kernel of its own
// (attention_bwd_queries.cuh). Blocks stay and walk over tiles.
#pragma once
#include <cstdint>

#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/attention_bwd_keys.cuh"
#include "sm90/attention_bwd_pipeline.cuh"
#include "sm90/attention_bwd_products.cuh"
#include "sm90/attention_bwd_ragged.cuh"

namespace flashvar::sm90 {

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
    ptx::mbarrier_arrive_expect(smem.full_k(), Config::kBytesK);
    load_pages<Config::kPagesK, Config::kPageBytesKV>(smem.k(), &arguments.k, smem.full_k(),
                                                      tile.first_key, tile.head_kv, tile.batch);
    bool first = true;
    for_each_step(tile, problem.group, [&](uint32_t head, int32_t m) {
      uint32_t const s = step.stage();
      int32_t const row = m * Config::kBlockQ;
      auto load_q = [&] {
        ptx::mbarrier_wait(smem.empty_q(s), step.phase() ^ 1);  // dK from this buffer is added
        ptx::mbarrier_arrive_expect(smem.full_q(s), Config::kBytesQ);
        load_pages<Config::kPages, Config::kPageBytesQ>(smem.q(s), &arguments.q, smem.full_q(s),
                                                        row, head, tile.batch);
      };
      if (Config::kSharesKeys || first) load_q();
      if (first) {
        ptx::mbarrier_arrive_expect(smem.full_v(), Config::kBytesV);
        load_pages<Config::kPagesV, Config::kPageBytesKV>(smem.v(), &arguments.v, smem.full_v(),
                                                          tile.first_key, tile.head_kv, tile.batch);
      }
      // dV from this buffer is added
      ptx::mbarrier_wait(smem.empty_grad_out(s), step.phase() ^ 1);
      ptx::mbarrier_arrive_expect(smem.full_grad_out(s),
                                  Config::kBytesGradOut + 2 * Config::kRowBytes);
      load_pages<Config::kPagesV, Config::kPageBytesQ>(
          smem.grad_out(s), &arguments.grad_out, smem.full_grad_out(s), row, head, tile.batch);
      load_row_values<Config>(arguments, smem, s, tile.query_tile(arguments, head, m));
      // Where products are shared dV is added before dK.
      if (!Config::kSharesKeys && !first) load_q();
      first = false;
      step.advance();
    });
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
    for (uint32_t slot = 0; Config::kRagged && slot < kTileSlots; ++slot) {
      ptx::mbarrier_init(smem.full_tile(slot), 1);
      ptx::mbarrier_init(smem.empty_tile(slot), 32 * warps + 2);  // and those who copy
    }
    if constexpr (Config::kRagged) ptx::mbarrier_init(smem.want_tile(), 1);
    for (uint32_t stage = 0; stage < Config::kScoreStages; ++stage) {
      ptx::mbarrier_init(smem.full_scores(stage), Config::kSharesKeys ? warps : 128);
      ptx::mbarrier_init(smem.empty_scores(stage), Config::kSharesKeys ? warps : 128);
    }
    for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(smem.full_q(stage), 1);
      ptx::mbarrier_init(smem.empty_q(stage), warps);
      ptx::mbarrier_init(smem.full_grad_out(stage), 1);
      // Its rows of LSE and D are read by the threads: each says so itself.
      ptx::mbarrier_init(smem.empty_grad_out(stage), 32 * warps);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (Config::kRagged) clear_missing_pages<Config>(arguments.problem, smem);
  ptx::release_next_grid();
  __syncthreads();  // the barriers, and zeros, are there for all
  if (threadIdx.x < 128) {
    ptx::registers_give<Config::kProducerRegisters>();
    if constexpr (Config::kRagged) {
      produce_ragged<Config>(arguments, smem);
    } else if (threadIdx.x == 0) {
      ptx::await_last_grid();
      produce_bwd<Config>(arguments, smem);
    }
  } else {
    ptx::registers_take<Config::kConsumerRegisters>();
    if constexpr (Config::kSharesKeys) {
      // The same in all lanes, and shown to be: descriptors then live in uniform registers.
      consume_keys<Config>(arguments, smem, __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0));
    } else if (threadIdx.x < 256) {
      consume_values<Config>(arguments, smem);
    } else {
      consume_scores<Config>(arguments, smem);
    }
  }
}

}  // namespace flashvar::sm90
