// Attention forward with wgmma and TMA (the schedule of FlashAttention-3: Shah et al., 2024).
//
// Persistent CTAs of one producer warpgroup (a load warp issues all TMA loads, a scheduler warp
// publishes work tiles) and one to four consumer warpgroups of 64 query rows each. A consumer
// issues S(n) = Q K(n)^T and O += P(n+1) V(n+1) together. It computes the softmax of S(n) while the
// GEMMs of other consumers and, above head dim 64, its own P V run. Device code only; launched by
// fwd_wgmma_launch.cuh.
#pragma once
#include <cstdint>

#include "attention/outside_rows.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp_uniform.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/attention/fwd_config.cuh"
#include "sm90/attention/fwd_consumer.cuh"
#include "sm90/attention/fwd_loads.cuh"
#include "sm90/attention/line_shift.h"
#include "sm90/attention/query_tile.cuh"

namespace flashvar::sm90::attention {

struct FwdArgs : QueryScheduler {
  LineShift shift_k, shift_v;  // of K, which Q shares, and of V
  FwdProblem problem;
  CUtensorMap q, k, v;
};

// The load warp: issues all TMA loads, in the order in which consumers need them.
template <class Config>
__device__ __forceinline__ void fwd_produce(const FwdArgs& args,
                                            const QueryTileSmem<Config>& smem) {
  const FwdProblem& problem = args.problem;
  PipelineState<1> q;
  PipelineState<Config::kStages> k, v;
  for (WorkTile work_tile = WorkTile::receive(smem, 0); work_tile.exists();
       work_tile = WorkTile::receive(smem, q.count)) {
    QueryTile<Config> const tile(args, work_tile);
    // Varlen tensors have one batch index, 0; sequences start at their offsets.
    uint32_t const batch_q = Config::kSplits ? problem.batch_of_queries(tile.batch)
                             : problem.queries.offsets == nullptr ? tile.batch
                                                                  : 0;
    uint32_t const batch_k = problem.keys.offsets == nullptr ? tile.batch : 0;
    int32_t const shift_k = Config::kShiftsK ? args.shift_k.of(tile.batch, tile.head_kv) : 0;
    int32_t const shift_v = Config::kShiftsV ? args.shift_v.of(tile.batch, tile.head_kv) : 0;
    ptx::mbarrier_wait(smem.empty_q(), q.phase() ^ 1);  // the previous tile has released Q
    if (!tile.has_keys()) {
      WorkTile::release(smem);
      if (threadIdx.x == 0) ptx::mbarrier_arrive(smem.full_q());  // in place of Q's load
      q.advance();
      continue;
    }
    if constexpr (Config::kSplits) {
      load_members<Config>(smem.q(), &args.q, smem.full_q(),
                           tile.row_q + tile.query(tile.first_query), tile.head, batch_q);
    } else {
      load_moved_tile<Config::kColBlocks, Config::kColBlockBytesQ>(
          smem.q(), &args.q, smem.full_q(), ptx::CacheHint::kEvictFirst,
          tile.row_q + tile.first_query, tile.head, batch_q, shift_k);
    }
    q.advance();
    int32_t const release_at = tile.release_at();
    for (int32_t n = tile.end - 1; n >= tile.begin - 1; --n) {
      if (n == release_at) WorkTile::release(smem);
      if (n >= tile.begin) {
        // S, which read this stage, is complete.
        ptx::mbarrier_wait(smem.empty_k(k.stage()), k.phase() ^ 1);
        load_moved_tile<Config::kColBlocks, Config::kColBlockBytesKV>(
            smem.k(k.stage()), &args.k, smem.full_k(k.stage()), ptx::CacheHint::kEvictLast,
            tile.row_k + n * Config::kBlockKV, tile.head_kv, batch_k, shift_k);
        k.advance();
      }
      if (n + 1 < tile.end) {
        // P V, which read this stage, is complete.
        ptx::mbarrier_wait(smem.empty_v(v.stage()), v.phase() ^ 1);
        load_moved_tile<Config::kColBlocksV, Config::kColBlockBytesKV>(
            smem.v(v.stage()), &args.v, smem.full_v(v.stage()), ptx::CacheHint::kEvictLast,
            tile.row_k + (n + 1) * Config::kBlockKV, tile.head_kv, batch_k, shift_v);
        v.advance();
      }
    }
  }
}

// One consumer warpgroup: 64 rows of every tile of the CTA. Over 100 lines, because its steps are
// closures over the consumer's registers and pipeline states; the main loop itself is short.
template <class Config>
__device__ __forceinline__ void fwd_consume(const FwdArgs& args, const QueryTileSmem<Config>& smem,
                                            uint32_t warpgroup) {
  const FwdProblem& problem = args.problem;
  bool const foreign_tail = problem.has_foreign_tail();
  uint32_t const next = (warpgroup + 1) % Config::kConsumers;
  PipelineState<1> q;
  PipelineState<Config::kStages> k, v;
  // The last consumer's first arrival lets consumer 0 go first.
  if (Config::kOrdered && next == 0) ptx::named_barrier_arrive(kOrder, 256);
  auto release = [&](uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  };
  for (WorkTile work_tile = WorkTile::receive(smem, 0); work_tile.exists();
       work_tile = WorkTile::receive(smem, q.count)) {
    WorkTile::release(smem);
    QueryTile<Config> const tile(args, work_tile);
    auto const shift_v = [&] {
      return Config::kShiftsV ? args.shift_v.of(tile.batch, tile.head_kv) : 0;
    };
    FwdConsumer<Config> consumer{{smem.bias(warpgroup * 4 + threadIdx.x / 32 % 4)}};
    ptx::mbarrier_wait(smem.full_q(), q.phase());  // Q is loaded
    q.advance();
    if (!tile.has_keys()) {
      release(smem.empty_q());
      consumer.store_results(problem, tile, warpgroup, shift_v());
      continue;
    }
    uint32_t const sQ = smem.q() + warpgroup * 64 * 128;
    int32_t n = tile.end - 1;
    // Precondition: S(n) is complete. Releases K(n) (with the last one also Q) and computes P(n).
    auto finish_scores = [&](auto is_first) {
      ptx::wgmma_fence_operand(consumer.rS);
      if constexpr (Config::kLazy && !is_first.value) {
        consumer.lazy_softmax_step(problem, tile, warpgroup, n, sQ, smem.k(k.stage()));
        if (n == tile.begin) release(smem.empty_q());
      } else {
        if (n == tile.begin) release(smem.empty_q());
        consumer.template softmax_step<is_first.value>(problem, tile, warpgroup, n);
      }
      release(smem.empty_k(k.stage()) + consumer.zero_after_softmax());
      k.advance();
    };
    // Precondition: P(n+1) V(n+1) is complete. Releases V(n+1).
    auto finish_output = [&] {
      ptx::wgmma_fence_operand(consumer.rO);
      release(smem.empty_v(v.stage()));
      v.advance();
    };
    // Ordering barrier: the previous consumer has issued its GEMMs.
    auto wait_order = [&] {
      if constexpr (Config::kOrdered) ptx::named_barrier_sync(kOrder + warpgroup, 256);
    };
    // Lets the next consumer issue its GEMMs.
    auto signal_next = [&] {
      if constexpr (Config::kOrdered) ptx::named_barrier_arrive(kOrder + next, 256);
    };

    // No row of this consumer sees the key blocks n >= own_end. It waits for each of them and
    // releases it unread; without the wait a stage could be released twice in one phase. The block
    // whose tail zero_rows() must clear is not skipped: zero_rows() is a barrier of all consumers,
    // and a second call would lengthen the main loop. With kSplits many consumers have no rows, so
    // there it is skipped.
    bool const zero_tail = foreign_tail && tile.mask.seqlen_k < tile.end * Config::kBlockKV;
    bool const reads_tail = zero_tail && !Config::kSplits;
    int32_t const own_end = reads_tail ? tile.end : tile.key_blocks_end(warpgroup);
    // Precondition: n is the last block, and no consumer waits for the order of GEMMs.
    auto zero_rows_of_tail = [&] {
      ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());  // V(n) is loaded
      zero_rows<Config, Config::kColBlocksV>(smem.v(v.stage()),
                                             tile.mask.seqlen_k - n * Config::kBlockKV);
    };
    if constexpr (Config::kModifiers) {
      consumer.load_bias(problem, tile, tile.first_query + warpgroup * 64,
                         (own_end - 1) * Config::kBlockKV);
    }
#pragma unroll 1
    for (; n >= own_end; --n) {
      ptx::mbarrier_wait(smem.full_k(k.stage()), k.phase());  // K(n) is loaded
      release(smem.empty_k(k.stage()));
      k.advance();
      if constexpr (Config::kSplits) {
        if (zero_tail && n == tile.end - 1) zero_rows_of_tail();
      }
      wait_order();
      signal_next();
      ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());  // V(n) is loaded
      release(smem.empty_v(v.stage()));
      v.advance();
    }
    ptx::mbarrier_wait(smem.full_k(k.stage()), k.phase());  // K(n) is loaded
    consumer.gemm_qk(sQ, smem.k(k.stage()));
    ptx::wgmma_wait<0>();
    finish_scores(std::true_type{});
    if constexpr (!Config::kEarlyWait) consumer.pack();
    if (zero_tail && (!Config::kSplits || n == tile.end - 1)) zero_rows_of_tail();
    for (--n; n >= tile.begin; --n) {
      ptx::mbarrier_wait(smem.full_k(k.stage()), k.phase());  // K(n) is loaded
      wait_order();
      consumer.gemm_qk(sQ, smem.k(k.stage()));
      ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());  // V(n+1) is loaded
      consumer.gemm_pv(smem.v(v.stage()));
      signal_next();
      if constexpr (Config::kEarlyWait) {
        ptx::wgmma_wait<0>();
        finish_output();
        finish_scores(std::false_type{});
      } else {
        ptx::wgmma_wait<1>();
        finish_scores(std::false_type{});
        ptx::wgmma_wait<0>();
        finish_output();
        consumer.pack();
        consumer.rescale();
      }
    }
    ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());  // V(n+1) is loaded
    consumer.gemm_pv(smem.v(v.stage()));
    ptx::wgmma_wait<0>();
    finish_output();
    consumer.store_results(problem, tile, warpgroup, shift_v());
  }
  if (Config::kOrdered && warpgroup == 0) {
    ptx::named_barrier_sync(kOrder, 256);  // takes the last arrival, for which no tile waited
  }
}

// The forward kernel. Variants: FwdVariant.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocksPerSM)
    fwd_kernel(const __grid_constant__ FwdArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  QueryTileSmem<Config> const smem{ptx::smem_address(shared)};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.full_q(), 1);
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
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  // fwd_merge_kernel may start now. It reads inputs at once, so not before the wait above, and
  // executes griddepcontrol.wait before it reads the results. Calls without it let no kernel start
  // early: any kernel may follow, whose CTAs would pile up on the SMs that become free first
  // (fwd_wgmma_launch.cuh).
  if (Config::kSplits && (!Config::kStoresWhole || args.problem.splits.out != nullptr)) {
    ptx::griddepcontrol_launch_dependents();
  }
  __syncthreads();  // mbarriers are initialized
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      fwd_produce<Config>(args, smem);
    } else if (threadIdx.x < 64) {
      schedule_query_tiles<Config>(args, smem);
    } else if (args.problem.queries.offsets != nullptr) {
      for (uint32_t head = blockIdx.x; head < args.problem.heads_q; head += gridDim.x) {
        store_outside_rows(args.problem, head, threadIdx.x / 32 - 2, 2);
      }
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    uint32_t const warpgroup = threadIdx.x / 128 - 1;
    fwd_consume<Config>(args, smem, Config::kUniform ? ptx::warp_uniform(warpgroup) : warpgroup);
  }
}

}  // namespace flashvar::sm90::attention
