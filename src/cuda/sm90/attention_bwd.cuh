// Attention backward with wgmma and TMA (after FlashAttention-3: Shah et al., 2024).
//
// A block owns a tile of keys and walks the queries that see it. A thread of the producer
// warpgroup, or two, starts all copies. Two consumer warpgroups share the work in one of two ways
// (Sharing): up to head dim 128 each owns 64 keys; above, dK and dV of 64 keys fill the registers
// of both, so one computes S and dV, the other dP and dK, and P goes from the first to the second.
// Both compute half of every dQ, which is added to fp32 sums in the workspace. Blocks stay and walk
// over tiles.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/attention_bwd_consumer.cuh"
#include "sm90/attention_bwd_features.cuh"
#include "sm90/attention_bwd_pipeline.cuh"
#include "sm90/attention_bwd_ragged.cuh"
#include "sm90/attention_bwd_walk.cuh"

namespace flashvar::sm90 {

// Named barriers. kScores: dS is complete, for those who wrote it. kWeights: P is.
enum : uint32_t { kScores = 1, kWeights = 2 };

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
      ptx::mbarrier_wait(smem.empty_q(s), step.phase() ^ 1);  // dK from this buffer is added
      ptx::mbarrier_arrive_expect(smem.full_q(s), Config::kBytesQ);
      load_pages<Config::kPages, Config::kPageBytesQ>(smem.q(s), &arguments.q, smem.full_q(s), row,
                                                      head, tile.batch);
      if (first) {
        ptx::mbarrier_arrive_expect(smem.full_v(), Config::kBytesV);
        load_pages<Config::kPagesV, Config::kPageBytesKV>(smem.v(), &arguments.v, smem.full_v(),
                                                          tile.first_key, tile.head_kv, tile.batch);
        first = false;
      }
      // dV from this buffer is added
      ptx::mbarrier_wait(smem.empty_grad_out(s), step.phase() ^ 1);
      ptx::mbarrier_arrive_expect(smem.full_grad_out(s),
                                  Config::kBytesGradOut + 2 * Config::kRowBytes);
      load_pages<Config::kPagesV, Config::kPageBytesQ>(
          smem.grad_out(s), &arguments.grad_out, smem.full_grad_out(s), row, head, tile.batch);
      load_row_values<Config>(arguments, smem, s, tile.query_tile(arguments, head, m));
      step.advance();
    });
  }
}

// Sharing::kKeys.
template <class Config>
__device__ __forceinline__ void consume_keys(const AttentionBwdArguments& arguments,
                                             const BwdSmem<Config>& smem, uint32_t warpgroup) {
  using S = Scores<Config>;
  using ScoreState = PipelineState<Config::kScoreStages>;
  const AttentionBwdProblem& problem = arguments.problem;
  float const factor = problem.score_sign * problem.scale_log2;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState<1> kv;
  PipelineState<Config::kStages> step;
  uint32_t const offset = warpgroup * 64 * 128;  // of the warpgroup's rows in a page
  for (TileWalk<Config> tiles; tiles.left(arguments, smem); tiles.advance(arguments, smem)) {
    const auto& tile = tiles.tile(arguments, smem);
    if (!tile.exists()) continue;
    if constexpr (Config::kRagged) kv.count = tile.seen_before;  // held there, not here
    int32_t const first_key = tile.first_key + warpgroup * 64;
    float rK[Config::kHeadDim / 2], rV[Config::kHeadDimV / 2];
    clear(rK);
    clear(rV);
    if (tile.seen()) {
      typename S::Registers rS;
      QueryWalk walk(arguments, tile);
      auto start_scores = [&] {
        ptx::mbarrier_wait(smem.full_q(step.stage()), step.phase());
        multiply_scores<Config, Config::kHeadDim>(rS, smem.k() + offset, smem.q(step.stage()));
      };
      auto start_grad_q = [&](float (&rQ)[Config::kGradQCols / 2], const ScoreState& scores) {
        ptx::mbarrier_wait(smem.full_grad_scores(scores.stage()), scores.phase());
        multiply_grad_q<Config>(rQ, smem.grad_scores(scores.stage()), smem.k(), warpgroup);
      };
      auto hand_over = [&](const typename S::Packed& rdP, const ScoreState& scores) {
        // dQ from this buffer is computed
        ptx::mbarrier_wait(smem.empty_grad_scores(scores.stage()), scores.phase() ^ 1);
        store_scores<Config>(smem.grad_scores(scores.stage()) + warpgroup * Config::kPageBytesQ,
                             rdP);
        ptx::fence_async_proxy();
        __syncwarp();
        if (first_lane) ptx::mbarrier_arrive(smem.full_grad_scores(scores.stage()));
      };
      // S is there. In flight are, one after the other: dP | dQ of the step before, dV | dV, dK |
      // dK, S of the next step.
      auto take_step = [&](auto first, auto last) {
        uint32_t const s = step.stage();
        ScoreState const scores{step.count}, before{step.count - 1};
        typename S::Registers rdS;
        typename S::Packed rP, rdP;
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        multiply_scores<Config, Config::kHeadDimV>(rdS, smem.v() + offset, smem.grad_out(s));
        weigh<Config>(rS, factor, smem.lse(s), tile.mask, first_key, walk.m * Config::kBlockQ);
        S::pack(rS, rP);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rdS);
        differentiate_all<Config>(rS, rdS, smem.row_sums(s));
        S::pack(rdS, rdP);
        hand_over(rdP, scores);
        float rQ[Config::kGradQCols / 2];
        if constexpr (!first.value) start_grad_q(rQ, before);
        multiply_grad<Config, Config::kHeadDimV>(rV, rP, smem.grad_out(s));
        if constexpr (!first.value) {
          ptx::wgmma_wait<1>();
          ptx::wgmma_pin(rQ);
          if (first_lane) ptx::mbarrier_arrive(smem.empty_grad_scores(before.stage()));
        }
        multiply_grad<Config, Config::kHeadDim>(rK, rdP, smem.q(s));
        if constexpr (!first.value) {
          add_grad_q<Config>(rQ, grad_q_part<Config>(arguments, walk.before, warpgroup));
        }
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(rV);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));
        step.advance();
        walk.advance(arguments);
        if constexpr (!last.value) start_scores();
        ptx::wgmma_wait<last.value ? 0 : 1>();
        ptx::wgmma_pin(rK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        if constexpr (!last.value) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(rS);
        }
      };
      // Of kSerial: once in the code, as evaluating features is long, and the other warpgroup's
      // products run meanwhile.
      auto take_serial_step = [&] {
        uint32_t const s = step.stage(), head = walk.number / arguments.query_tiles;
        int32_t const first_query = walk.m * Config::kBlockQ;
        ScoreState const scores{step.count}, before{step.count - 1};
        typename S::Registers rdS;
        typename S::Packed rP, rdP;
        start_scores();
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        multiply_scores<Config, Config::kHeadDimV>(rdS, smem.v() + offset, smem.grad_out(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rS);
        ptx::wgmma_pin(rdS);
        if constexpr (Config::kFeatures) {
          evaluate_features<Config>(rS, rdS, rP, rdP, problem, tile, head,
                                    ColumnValues(smem.lse(s)), ColumnValues(smem.row_sums(s)),
                                    first_key, first_query);
          hide_keys<Config>(tile.mask, first_key, first_query, [&](int n, int half, int e) {
            S::clear(rP, n, half, e);
            S::clear(rdP, n, half, e);
          });
        } else {
          weigh<Config>(rS, factor, smem.lse(s), tile.mask, first_key, first_query);
          S::pack(rS, rP);
          differentiate_all<Config>(rS, rdS, smem.row_sums(s));
          S::pack(rdS, rdP);
        }
        bool const later = Config::kGradQ && walk.before != walk.kNone;
        float rQ[Config::kGradQCols / 2];
        if constexpr (Config::kGradQ) {
          hand_over(rdP, scores);
          // Of the first step it is of no use, and not added.
          if (later) ptx::mbarrier_wait(smem.full_grad_scores(before.stage()), before.phase());
          multiply_grad_q<Config>(rQ, smem.grad_scores(before.stage()), smem.k(), warpgroup);
        }
        multiply_grad<Config, Config::kHeadDimV>(rV, rP, smem.grad_out(s));
        multiply_grad<Config, Config::kHeadDim>(rK, rdP, smem.q(s));
        if constexpr (Config::kGradQ) {
          ptx::wgmma_wait<2>();
          ptx::wgmma_pin(rQ);
        }
        if (later) {
          if (first_lane) ptx::mbarrier_arrive(smem.empty_grad_scores(before.stage()));
          add_grad_q<Config>(rQ, grad_q_part<Config>(arguments, walk.before, warpgroup));
        }
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(rV);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        step.advance();
        walk.advance(arguments);
      };
      ptx::mbarrier_wait(smem.full_k(), kv.phase());
      if constexpr (Config::kSerial) {
        ptx::mbarrier_wait(smem.full_v(), kv.phase());
        while (walk.left > 0) take_serial_step();
      } else {
        start_scores();
        ptx::mbarrier_wait(smem.full_v(), kv.phase());
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rS);
        if (walk.left == 1) {
          take_step(std::true_type{}, std::true_type{});
        } else {
          take_step(std::true_type{}, std::false_type{});
          while (walk.left > 1) take_step(std::false_type{}, std::false_type{});
          take_step(std::false_type{}, std::true_type{});
        }
      }
      if constexpr (Config::kGradQ) {
        float rQ[Config::kGradQCols / 2];
        ScoreState const before{step.count - 1};
        start_grad_q(rQ, before);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rQ);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_grad_scores(before.stage()));
        add_grad_q<Config>(rQ, grad_q_part<Config>(arguments, walk.before, warpgroup));
      }
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());
      kv.advance();
    }
    store_grad<Config, Config::kHeadDimV>(problem.grad_v, tile.batch, tile.head_kv, tile.rows(), rV,
                                          grad_v_scale<Config>(problem), first_key,
                                          problem.head_dim_v);
    store_grad<Config, Config::kHeadDim>(problem.grad_k, tile.batch, tile.head_kv, tile.rows(), rK,
                                         problem.features.scale, first_key, problem.head_dim);
  }
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
  for (TileWalk<Config> tiles; tiles.left(arguments, smem); tiles.advance(arguments, smem)) {
    const auto& tile = tiles.tile(arguments, smem);
    if (!tile.exists()) continue;
    float rV[Config::kHeadDimV / 2];
    clear(rV);
    if (tile.seen()) {
      ptx::mbarrier_wait(smem.full_k(), kv.phase());
      for_each_step(tile, problem.group, [&](uint32_t head, int32_t m) {
        uint32_t const s = step.stage();
        typename S::Registers rS;
        typename S::Packed rP;
        ptx::mbarrier_wait(smem.full_q(s), step.phase());
        multiply_scores<Config, Config::kHeadDim>(rS, smem.k(), smem.q(s));
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rS);
        if constexpr (Config::kFeatures) {
          weigh_features<Config>(rS, rP, problem, tile, head, ColumnValues(smem.lse(s)),
                                 tile.first_key, m * Config::kBlockQ);
          hide_keys<Config>(tile.mask, tile.first_key, m * Config::kBlockQ,
                            [&](int n, int half, int e) {
                              S::clear(rP, n, half, e);
                              rS[4 * n + 2 * half + e] = 0.f;
                            });
        } else {
          weigh<Config>(rS, factor, smem.lse(s), tile.mask, tile.first_key, m * Config::kBlockQ);
        }
        uint32_t const weights = smem.weights() + ptx::thread_index() % 128 * 16;
#pragma unroll
        for (int n = 0; n < S::kColumns; ++n) {
          ptx::shared_store(weights + n * 128 * 16, rS[4 * n], rS[4 * n + 1], rS[4 * n + 2],
                            rS[4 * n + 3]);
        }
        ptx::named_barrier_arrive(kWeights, 256);
        if constexpr (!Config::kFeatures) S::pack(rS, rP);
        multiply_grad<Config, Config::kHeadDimV>(rV, rP, smem.grad_out(s));
        // dS is there, and the other has read P
        ptx::mbarrier_wait(smem.full_grad_scores(0), step.count % 2);
        float rQ[Config::kGradQCols / 2];
        if constexpr (Config::kGradQ) {
          multiply_grad_q<Config>(rQ, smem.grad_scores(0), smem.k(), 0);
        }
        ptx::wgmma_wait<Config::kGradQ ? 1 : 0>();
        ptx::wgmma_pin(rV);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));
        if constexpr (Config::kGradQ) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(rQ);
        }
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        if constexpr (Config::kGradQ) {
          uint32_t const number = tile.query_tile(arguments, head, m);
          add_grad_q<Config>(rQ, grad_q_part<Config>(arguments, number, 0));
        }
        step.advance();
      });
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());
      kv.advance();
    }
    store_grad<Config, Config::kHeadDimV>(problem.grad_v, tile.batch, tile.head_kv, tile.rows(), rV,
                                          grad_v_scale<Config>(problem), tile.first_key,
                                          problem.head_dim_v);
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
  for (TileWalk<Config> tiles; tiles.left(arguments, smem); tiles.advance(arguments, smem)) {
    const auto& tile = tiles.tile(arguments, smem);
    if (!tile.exists()) continue;
    float rK[Config::kHeadDim / 2];
    clear(rK);
    if (tile.seen()) {
      ptx::mbarrier_wait(smem.full_v(), kv.phase());
      for_each_step(tile, problem.group, [&](uint32_t head, int32_t m) {
        uint32_t const s = step.stage();
        typename S::Registers rdS;
        typename S::Packed rdP;
        ptx::mbarrier_wait(smem.full_grad_out(s), step.phase());
        multiply_scores<Config, Config::kHeadDimV>(rdS, smem.v(), smem.grad_out(s));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rdS);
        // Also: the other is done with dS of the step before, as it then starts the next S.
        ptx::named_barrier_sync(kWeights, 256);
        uint32_t const weights = smem.weights() + ptx::thread_index() % 128 * 16;
#pragma unroll
        for (int n = 0; n < S::kColumns; ++n) {
          float4 const p = ptx::shared_load4(weights + n * 128 * 16);
          const float row[4] = {p.x, p.y, p.z, p.w};
          float2 const sums =
              ptx::shared_load2(smem.row_sums(s) + (n * 8 + ptx::thread_index() % 4 * 2) * 4);
          if (Config::kFeatures && problem.features.rng != nullptr) {
            differentiate_dropped<ColumnValues>(row, &rdS[4 * n], problem.features.dropout_scale,
                                                sums);
          } else {
            differentiate<ColumnValues>(row, &rdS[4 * n], sums);
          }
        }
        S::pack(rdS, rdP);
        if constexpr (Config::kGradQ) {
          store_scores<Config>(smem.grad_scores(0), rdP);
          ptx::fence_async_proxy();
        }
        ptx::mbarrier_arrive(smem.full_grad_scores(0));
        if constexpr (Config::kGradQ) ptx::named_barrier_sync(kScores, 128);
        ptx::mbarrier_arrive(smem.empty_grad_out(s));
        float rQ[Config::kGradQCols / 2];
        if constexpr (Config::kGradQ) {
          multiply_grad_q<Config>(rQ, smem.grad_scores(0), smem.k(), 1);
        }
        ptx::mbarrier_wait(smem.full_q(s), step.phase());
        multiply_grad<Config, Config::kHeadDim>(rK, rdP, smem.q(s));
        if constexpr (Config::kGradQ) {
          ptx::wgmma_wait<1>();
          ptx::wgmma_pin(rQ);
          uint32_t const number = tile.query_tile(arguments, head, m);
          add_grad_q<Config>(rQ, grad_q_part<Config>(arguments, number, 1));
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(rK);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_q(s));
        step.advance();
      });
      if (first_lane) ptx::mbarrier_arrive(smem.empty_kv());
      kv.advance();
    }
    store_grad<Config, Config::kHeadDim>(problem.grad_k, tile.batch, tile.head_kv, tile.rows(), rK,
                                         problem.features.scale, tile.first_key, problem.head_dim);
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
      ptx::mbarrier_init(smem.full_grad_scores(stage), Config::kSharesKeys ? warps : 128);
      ptx::mbarrier_init(smem.empty_grad_scores(stage), warps);
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
