// Attention forward with wgmma and TMA (the schedule of FlashAttention-3: Shah et al., 2024).
//
// A block is one producer warpgroup, of which one warp starts all copies, and two to four consumer
// warpgroups of 64 query rows each. A consumer starts S(n) = Q K(n)^T and O += P(n+1) V(n+1)
// together and computes the softmax of S(n) while others' products run and, above head dim 64, its
// own second one. Blocks stay and walk over tiles.
#pragma once
#include <cstdint>

#include "core/outside_rows.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/attention_fwd_consumer.cuh"
#include "sm90/query_tiles.cuh"

namespace flashvar::sm90 {

struct AttentionFwdArguments : QueryItems {
  AttentionFwdProblem problem;
  CUtensorMap q, k, v;
};

// One warp: all copies of the block's tiles, in the order in which consumers want them.
template <class Config>
__device__ __forceinline__ void produce(const AttentionFwdArguments& arguments,
                                        const Smem<Config>& smem) {
  const AttentionFwdProblem& problem = arguments.problem;
  PipelineState<1> q;
  PipelineState<Config::kStages> k, v;
  for (Place place = Place::receive(smem, 0); place.exists();
       place = Place::receive(smem, q.count)) {
    Tile<Config> const tile(arguments, place);
    // Packed sequences share one batch index; their rows begin where their offsets say.
    uint32_t const batch_q = problem.queries.offsets == nullptr ? tile.batch : 0;
    uint32_t const batch_k = problem.keys.offsets == nullptr ? tile.batch : 0;
    ptx::mbarrier_wait(smem.empty_q(), q.phase() ^ 1);  // the tile before is done with Q
    if (!tile.sees()) {
      Place::want_next(smem);
      if (threadIdx.x == 0) ptx::mbarrier_arrive(smem.full_q());
      q.advance();
      continue;
    }
    load_rows<Config::kPages, Config::kPageBytesQ>(
        smem.q(), &arguments.q, smem.full_q(), ptx::CacheHint::kEvictFirst,
        tile.row_q + tile.first_query, tile.head, batch_q);
    q.advance();
    // Found earlier, the next tile might be one that another block would start sooner.
    int32_t const soon = min(tile.begin + Config::kBlocksAhead, tile.end - 1);
    for (int32_t n = tile.end - 1; n >= tile.begin - 1; --n) {
      if (n == soon) Place::want_next(smem);
      if (n >= tile.begin) {
        ptx::mbarrier_wait(smem.empty_k(k.stage()),
                           k.phase() ^ 1);  // S from this buffer is computed
        load_rows<Config::kPages, Config::kPageBytesKV>(
            smem.k(k.stage()), &arguments.k, smem.full_k(k.stage()), ptx::CacheHint::kEvictLast,
            tile.row_k + n * Config::kBlockKV, tile.head_kv, batch_k);
        k.advance();
      }
      if (n + 1 < tile.end) {
        ptx::mbarrier_wait(smem.empty_v(v.stage()),
                           v.phase() ^ 1);  // P V from this buffer is added
        load_rows<Config::kPagesV, Config::kPageBytesKV>(
            smem.v(v.stage()), &arguments.v, smem.full_v(v.stage()), ptx::CacheHint::kEvictLast,
            tile.row_k + (n + 1) * Config::kBlockKV, tile.head_kv, batch_k);
        v.advance();
      }
    }
  }
}

// One warpgroup: the scores, softmax and output of its 64 rows of every tile.
template <class Config>
__device__ __forceinline__ void consume(const AttentionFwdArguments& arguments,
                                        const Smem<Config>& smem, uint32_t warpgroup) {
  const AttentionFwdProblem& problem = arguments.problem;
  bool const tail = problem.keys.offsets != nullptr || problem.seqused_k != nullptr;
  uint32_t const next = (warpgroup + 1) % Config::kConsumers;
  PipelineState<1> q;
  PipelineState<Config::kStages> k, v;
  if (Config::kTurns && next == 0) ptx::named_barrier_arrive(kTurn, 256);  // consumer 0 begins
  auto release = [&](uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  };
  for (Place place = Place::receive(smem, 0); place.exists();
       place = Place::receive(smem, q.count)) {
    Place::want_next(smem);
    Tile<Config> const tile(arguments, place);
    Consumer<Config> consumer;
    ptx::mbarrier_wait(smem.full_q(), q.phase());
    q.advance();
    if (!tile.sees()) {
      release(smem.empty_q());
      consumer.store_output(problem, tile, warpgroup);
      continue;
    }
    uint32_t const sQ = smem.q() + warpgroup * 64 * 128;
    int32_t n = tile.end - 1;
    auto take_scores = [&](auto is_first) {  // S(n) is computed: K(n), and with the last Q, may go
      ptx::wgmma_pin(consumer.rS);
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
    auto take_output = [&] {  // P V(n + 1) is added: V(n + 1) may go
      ptx::wgmma_pin(consumer.rO);
      release(smem.empty_v(v.stage()));
      v.advance();
    };
    auto await_turn = [&] {  // the one before has started its products
      if constexpr (Config::kTurns) ptx::named_barrier_sync(kTurn + warpgroup, 256);
    };
    auto pass_turn = [&] {
      if constexpr (Config::kTurns) ptx::named_barrier_arrive(kTurn + next, 256);
    };

    // Blocks that others see are waited for, so that no buffer is released twice in a phase. Of one
    // that is to be zeroed beyond the sequence's end nobody stays away.
    bool const zeroes = tail && tile.mask.seqlen_k < tile.end * Config::kBlockKV;
    int32_t const own_end = zeroes ? tile.end : tile.end_of(warpgroup);
#pragma unroll 1
    for (; n >= own_end; --n) {
      ptx::mbarrier_wait(smem.full_k(k.stage()), k.phase());
      release(smem.empty_k(k.stage()));
      k.advance();
      await_turn();
      pass_turn();
      ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());
      release(smem.empty_v(v.stage()));
      v.advance();
    }
    ptx::mbarrier_wait(smem.full_k(k.stage()), k.phase());
    consumer.multiply_qk(sQ, smem.k(k.stage()));
    ptx::wgmma_wait<0>();
    take_scores(std::true_type{});
    if constexpr (!Config::kEarlyWait) consumer.pack();
    if (zeroes) {
      ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());
      zero_rows<Config, Config::kPagesV>(smem.v(v.stage()),
                                         tile.mask.seqlen_k - n * Config::kBlockKV);
    }
    for (--n; n >= tile.begin; --n) {
      ptx::mbarrier_wait(smem.full_k(k.stage()), k.phase());
      await_turn();
      consumer.multiply_qk(sQ, smem.k(k.stage()));
      ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());
      consumer.multiply_pv(smem.v(v.stage()));
      pass_turn();
      if constexpr (Config::kEarlyWait) {
        ptx::wgmma_wait<0>();
        take_output();
        take_scores(std::false_type{});
      } else {
        ptx::wgmma_wait<1>();
        take_scores(std::false_type{});
        ptx::wgmma_wait<0>();
        take_output();
        consumer.pack();
        consumer.rescale();
      }
    }
    ptx::mbarrier_wait(smem.full_v(v.stage()), v.phase());
    consumer.multiply_pv(smem.v(v.stage()));
    ptx::wgmma_wait<0>();
    take_output();
    consumer.store_output(problem, tile, warpgroup);
  }
  if (Config::kTurns && warpgroup == 0) {
    ptx::named_barrier_sync(kTurn, 256);  // the turn that nobody took
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_fwd_kernel(const __grid_constant__ AttentionFwdArguments arguments) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Smem<Config> const smem{smem_address(shared)};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.full_q(), 1);
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
  __syncthreads();  // the barriers are there for all
  if (threadIdx.x < 128) {
    ptx::registers_give<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      produce<Config>(arguments, smem);
    } else if (threadIdx.x < 64) {
      find_query_tiles<Config>(arguments, smem);
    } else if (arguments.problem.queries.offsets != nullptr) {
      for (uint32_t head = blockIdx.x; head < arguments.problem.heads_q; head += gridDim.x) {
        store_outside_rows(arguments.problem, head, threadIdx.x / 32 - 2, 2);
      }
    }
  } else {
    ptx::registers_take<Config::kConsumerRegisters>();
    // A shuffle shows that the number is the same for all of a warp.
    uint32_t const warpgroup = threadIdx.x / 128 - 1;
    consume<Config>(arguments, smem,
                    Config::kUniform ? __shfl_sync(0xffffffffu, warpgroup, 0) : warpgroup);
  }
}

}  // namespace flashvar::sm90
