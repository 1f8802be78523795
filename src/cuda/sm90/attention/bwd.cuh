// Attention backward with wgmma and TMA (after FlashAttention-3: Shah et al., 2024).
//
// Persistent CTAs of one producer and one or two consumer warpgroups. A CTA owns a key tile and
// iterates over the query blocks to which it is visible; WorkSplit says how the consumers split the
// work. dQ is added to fp32 sums in the workspace or stored (bwd_grad_q.cuh), or has a kernel of
// its own (bwd_dq.cuh). Device code only; launched by bwd_wgmma_launch.cuh.
#pragma once
#include <cstdint>

#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp_uniform.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/attention/bwd_consumer_gemms.cuh"
#include "sm90/attention/bwd_consumer_keys.cuh"
#include "sm90/attention/bwd_consumer_small.cuh"
#include "sm90/attention/bwd_dynamic.cuh"
#include "sm90/attention/key_tile.cuh"

namespace flashvar::sm90::attention {

// Loads a tile's column blocks. Completes on the mbarrier `full`, which must expect the bytes.
template <int kColBlocks, int kColBlockBytes>
__device__ __forceinline__ void load_col_blocks(uint32_t smem, const CUtensorMap* map,
                                                uint32_t full, int32_t row, uint32_t head,
                                                uint32_t batch) {
#pragma unroll
  for (int col_block = 0; col_block < kColBlocks; ++col_block) {
    ptx::tma_load_4d(smem + col_block * kColBlockBytes, map, full, ptx::CacheHint::kEvictLast,
                     col_block * kColBlockCols, row, head, batch);
  }
}

// The producer thread for dense sequences: issues all TMA loads, in the order in which consumers
// need them.
template <class Config>
__device__ __forceinline__ void bwd_produce(const BwdArgs& args, const KeyTileSmem<Config>& smem) {
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  for (KeyWork work; work.exists(args); ++work.taken) {
    KeyTile<Config> const tile(args, work);
    if (!tile.exists() || !tile.has_queries()) continue;
    auto load_kv = [&] {
      // The previous tile has released K and V.
      ptx::mbarrier_wait(smem.empty_kv(), kv.phase() ^ 1);
      kv.advance();
      ptx::mbarrier_arrive_expect(smem.full_k(), Config::kBytesK);
      load_col_blocks<Config::kColBlocksK, Config::kColBlockBytesKV>(
          smem.k(), &args.k, smem.full_k(), tile.first_key,
          tile.split_head / args.splits.count_divisor, tile.batch);
      ptx::mbarrier_arrive_expect(smem.full_v(), Config::kBytesV);
      load_col_blocks<Config::kColBlocksV, Config::kColBlockBytesKV>(
          smem.v(), &args.v, smem.full_v(), tile.first_key,
          tile.split_head / args.splits.count_divisor, tile.batch);
    };
    bool first = true;
    for_each_step(args, tile, [&](uint32_t head, int32_t m) {
      uint32_t const s = step.stage();
      int32_t const row = m * Config::kBlockQ;
      auto load_q = [&] {
        // dK, which read this stage, is complete.
        ptx::mbarrier_wait(smem.empty_q(s), step.phase() ^ 1);
        ptx::mbarrier_arrive_expect(smem.full_q(s), Config::kBytesQ);
        load_col_blocks<Config::kColBlocks, Config::kColBlockBytesQ>(
            smem.q(s), &args.q, smem.full_q(s), row, head, tile.batch);
      };
      if (Config::kSplitsKeys || first) load_q();
      // dV, which read this stage, is complete, and LSE and delta are read.
      ptx::mbarrier_wait(smem.empty_grad_out(s), step.phase() ^ 1);
      ptx::mbarrier_arrive_expect(smem.full_grad_out(s),
                                  Config::kBytesGradOut + 2 * Config::kRowBytes);
      load_col_blocks<Config::kColBlocksV, Config::kColBlockBytesQ>(
          smem.grad_out(s), &args.grad_out, smem.full_grad_out(s), row, head, tile.batch);
      load_row_values<Config>(args, smem, s, tile.query_tile(args, head, m));
      // K and V come after the first Q and dO, whose stages are free while the previous tile still
      // holds K and V.
      if (first) load_kv();
      // WorkSplit::kGemms: consumers need dO before Q.
      if (!Config::kSplitsKeys && !first) load_q();
      first = false;
      step.advance();
    });
  }
}

// The dK and dV kernel. Variants: BwdVariant.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSM)
    bwd_kernel(const __grid_constant__ BwdArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  KeyTileSmem<Config> const smem{ptx::smem_address(shared)};
  if (threadIdx.x == 0) {
    uint32_t const warps = 4 * Config::kConsumers;
    ptx::mbarrier_init(smem.full_k(), 1);
    ptx::mbarrier_init(smem.full_v(), 1);
    ptx::mbarrier_init(smem.empty_kv(), warps);
    for (uint32_t slot = 0; Config::kDynamic && slot < kTileSlots; ++slot) {
      ptx::mbarrier_init(smem.full_tile(slot), 1);
      ptx::mbarrier_init(smem.empty_tile(slot), 32 * warps + 2);  // consumers and two load threads
    }
    if constexpr (Config::kDynamic) ptx::mbarrier_init(smem.tile_request(), 1);
    // Splitting keys: dS, for which a lane of each warp of both consumers arrives. Splitting GEMMs:
    // P, for which each thread of one consumer arrives.
    for (uint32_t stage = 0; stage < Config::kExchangeStages; ++stage) {
      ptx::mbarrier_init(smem.full_exchange(stage), Config::kSplitsKeys ? warps : 128);
      ptx::mbarrier_init(smem.empty_exchange(stage), Config::kSplitsKeys ? warps : 128);
    }
    for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(smem.full_q(stage), 1);
      ptx::mbarrier_init(smem.empty_q(stage), warps);
      ptx::mbarrier_init(smem.full_grad_out(stage), 1);
      // LSE and delta are read with ordinary loads, so each thread arrives for itself.
      ptx::mbarrier_init(smem.empty_grad_out(stage), 32 * warps);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (Config::kDynamic) zero_missing_col_blocks<Config>(args.problem, smem);
  // The next kernel may start now; it executes griddepcontrol.wait before it reads this one's
  // results.
  ptx::griddepcontrol_launch_dependents();
  __syncthreads();  // mbarriers are initialized, zeros are written
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if constexpr (Config::kDynamic) {
      bwd_produce_dynamic<Config>(args, smem);
    } else if (threadIdx.x == 0) {
      ptx::griddepcontrol_wait();  // preprocess kernel: LSE, delta and zeros are written
      bwd_produce<Config>(args, smem);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    if constexpr (Config::kSmall) {
      bwd_consume_small<Config>(args, smem);
    } else if constexpr (Config::kSplitsKeys) {
      bwd_consume_keys<Config>(args, smem, ptx::warp_uniform(threadIdx.x / 128 - 1));
    } else if (threadIdx.x < 256) {
      bwd_consume_dv<Config>(args, smem);
    } else {
      bwd_consume_dk<Config>(args, smem);
    }
  }
}

}  // namespace flashvar::sm90::attention
