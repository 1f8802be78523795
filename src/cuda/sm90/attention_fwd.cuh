// Attention forward with wgmma and TMA (the schedule of FlashAttention-3: Shah et al., 2024).
//
// A block is one producer warpgroup, of which one thread starts all copies, and two or three
// consumer warpgroups of 64 query rows each. A consumer starts S(n) = Q K(n)^T and O += P(n+1)
// V(n+1) together and computes the softmax of S(n) while the second is still running; consumers
// take turns, so that one's softmax hides under another's products. Blocks stay and walk over
// tiles.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "core/mask.cuh"
#include "core/online_softmax.cuh"
#include "core/problem.h"
#include "ptx/mbarrier.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/config.cuh"

namespace flashvar::sm90 {

struct AttentionFwdArguments {
  AttentionFwdProblem problem;
  CUtensorMap q, k, v;
  uint32_t items;  // tiles of kBlockQ query rows, or pairs of them, over all heads and batches
  bool paired;
};

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Which buffer of a ring, and the parity of the phase that fills it.
struct PipelineState {
  uint32_t stage = 0, phase = 0;

  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Shared memory of a block. All tiles are 1024-byte aligned.
template <class Config>
struct Smem {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base + Config::kBarrierBytes; }
  __device__ __forceinline__ uint32_t k(uint32_t stage) const {
    return q() + Config::kBytesQ + stage * Config::kBytesKV;
  }
  __device__ __forceinline__ uint32_t v(uint32_t stage) const { return k(Config::kStages + stage); }

  // Q is there; all are done with Q; the same for each buffer of K and of V.
  __device__ __forceinline__ uint32_t full_q() const { return base; }
  __device__ __forceinline__ uint32_t empty_q() const { return base + 8; }
  __device__ __forceinline__ uint32_t full_k(uint32_t stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t empty_k(uint32_t stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t full_v(uint32_t stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t empty_v(uint32_t stage) const { return ring(3, stage); }

 private:
  __device__ __forceinline__ uint32_t ring(int which, uint32_t stage) const {
    return base + 16 + (which * Config::kStages + stage) * 8;
  }
};

// What a block does one after the other. Under a causal mask an item is two tiles of one head, the
// n-th from the end and the n-th from the start: so all items are equally long, and blocks that run
// at the same time read the same keys.
struct Turn {
  uint32_t item;
  bool second;

  __device__ __forceinline__ explicit Turn() : item(blockIdx.x), second(false) {}

  __device__ __forceinline__ void advance(const AttentionFwdArguments& arguments) {
    if (arguments.paired && !second) {
      second = true;
      return;
    }
    second = false;
    item += gridDim.x;
  }
};

// One tile of queries of one head, and the blocks of keys that they see.
template <class Config>
struct Tile {
  uint32_t batch, head, head_kv;
  int32_t first_query;
  int32_t begin, end;  // blocks of keys
  bool exists;         // the middle of an odd number of tiles is no pair

  __device__ __forceinline__ Tile(const AttentionFwdArguments& arguments, const Mask& mask,
                                  const Turn& turn) {
    const AttentionFwdProblem& problem = arguments.problem;
    uint32_t const blocks_q = (problem.queries.seqlen + Config::kBlockQ - 1) / Config::kBlockQ;
    uint32_t const per_head = arguments.paired ? (blocks_q + 1) / 2 : blocks_q;
    uint32_t const head_and_batch = turn.item / per_head;
    uint32_t const place = turn.item % per_head;
    uint32_t const block = turn.second ? place : blocks_q - 1 - place;
    exists = !turn.second || place != blocks_q - 1 - place;
    batch = head_and_batch / problem.heads_q;
    head = head_and_batch % problem.heads_q;
    head_kv = head / problem.group;
    first_query = block * Config::kBlockQ;
    int32_t const last = min(first_query + Config::kBlockQ, problem.queries.seqlen) - 1;
    begin = mask.visible_begin(first_query) / Config::kBlockKV;
    end = (mask.visible_end(last) + Config::kBlockKV - 1) / Config::kBlockKV;
  }
};

template <class Config>
__device__ __forceinline__ void load_kv(uint32_t smem, const CUtensorMap* map, uint32_t full,
                                        const Tile<Config>& tile, int32_t n) {
  ptx::mbarrier_arrive_expect(full, Config::kBytesKV);
#pragma unroll
  for (int page = 0; page < Config::kPages; ++page) {
    ptx::tma_load_4d(smem + page * Config::kPageBytesKV, map, full, ptx::CacheHint::kEvictLast,
                     page * kPageCols, n * Config::kBlockKV, tile.head_kv, tile.batch);
  }
}

// One thread: all copies of the block's tiles, in the order in which consumers want them.
template <class Config>
__device__ __forceinline__ void produce(const AttentionFwdArguments& arguments, const Mask& mask,
                                        const Smem<Config>& smem) {
  PipelineState k, v;
  uint32_t phase_q = 0;
  for (Turn turn; turn.item < arguments.items; turn.advance(arguments)) {
    Tile<Config> const tile(arguments, mask, turn);
    if (!tile.exists || tile.begin >= tile.end) continue;
    ptx::mbarrier_wait(smem.empty_q(), phase_q ^ 1);  // the tile before is done with Q
    phase_q ^= 1;
    ptx::mbarrier_arrive_expect(smem.full_q(), Config::kBytesQ);
#pragma unroll
    for (int page = 0; page < Config::kPages; ++page) {
      ptx::tma_load_4d(smem.q() + page * Config::kPageBytesQ, &arguments.q, smem.full_q(),
                       ptx::CacheHint::kEvictFirst, page * kPageCols, tile.first_query, tile.head,
                       tile.batch);
    }
    for (int32_t n = tile.end - 1; n >= tile.begin - 1; --n) {
      if (n >= tile.begin) {
        ptx::mbarrier_wait(smem.empty_k(k.stage), k.phase ^ 1);  // S from this buffer is computed
        load_kv<Config>(smem.k(k.stage), &arguments.k, smem.full_k(k.stage), tile, n);
        k.template advance<Config::kStages>();
      }
      if (n + 1 < tile.end) {
        ptx::mbarrier_wait(smem.empty_v(v.stage), v.phase ^ 1);  // P V from this buffer is added
        load_kv<Config>(smem.v(v.stage), &arguments.v, smem.full_v(v.stage), tile, n + 1);
        v.template advance<Config::kStages>();
      }
    }
  }
}

// Accumulators and operands of a consumer's thread.
template <class Config>
struct Consumer {
  using Dtype = typename Config::Dtype;
  static constexpr int kScores = Config::kBlockKV / 2;
  static constexpr int kSteps = Config::kBlockKV / 16;
  float rS[kScores];
  uint32_t rP[kSteps][4];
  float rO[Config::kHeadDim / 2];
  OnlineSoftmax<2> softmax;

  // Starts rS = Q K^T.
  __device__ __forceinline__ void multiply_qk(uint32_t sQ, uint32_t sK) {
    ptx::wgmma_pin(rS);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Config::kHeadDim / 16; ++kk) {
      uint32_t const page = kk / 4, column = kk % 4 * 32;
      ptx::Wgmma<Dtype, Config::kBlockKV>::template ss<false>(
          rS, ptx::wgmma_descriptor(sQ + page * Config::kPageBytesQ + column, 0),
          ptx::wgmma_descriptor(sK + page * Config::kPageBytesKV + column, 0), kk > 0);
    }
    ptx::wgmma_commit();
  }

  // Starts rO += P V.
  __device__ __forceinline__ void multiply_pv(uint32_t sV, bool accumulate) {
    ptx::wgmma_pin(rO);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      ptx::Wgmma<Dtype, Config::kHeadDim>::template rs<true>(
          rO, rP[kk], ptx::wgmma_descriptor(sV + kk * 16 * 128, Config::kPageBytesKV),
          accumulate || kk > 0);
    }
    ptx::wgmma_commit();
  }

  // -inf for keys that a row does not see.
  __device__ __forceinline__ void apply_mask(const Mask& mask, int32_t first_row,
                                             int32_t first_key) {
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t const row = first_row + warp * 16 + half * 8 + lane / 4;
      int32_t const end = mask.visible_end(row) - first_key - lane % 4 * 2;
      int32_t const begin = mask.visible_begin(row) - first_key - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Config::kBlockKV / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int const column = n * 8 + e;
          if (column >= end || column < begin) rS[4 * n + 2 * half + e] = -infinity();
        }
      }
    }
  }

  // Turns scores into weights; `factor` is what earlier sums are to be multiplied by.
  __device__ __forceinline__ void softmax_step(float scale_log2, float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float block_max = -infinity();
#pragma unroll
      for (int n = 0; n < Config::kBlockKV / 8; ++n) {
        block_max = fmaxf(block_max, fmaxf(rS[4 * n + 2 * r], rS[4 * n + 2 * r + 1]));
      }
      float shift;
      factor[r] = softmax.advance(r, block_max, scale_log2, shift);
#pragma unroll
      for (int n = 0; n < Config::kBlockKV / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = rS[4 * n + 2 * r + e];
          score = exp2_approx(score * scale_log2 - shift);
          softmax.row_sum[r] += score;
        }
      }
    }
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rP[kk][i] = Dtype::pack(rS[8 * kk + 2 * i], rS[8 * kk + 2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
    if (!__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) rO[i] *= factor[i / 2 % 2];
  }
};

// Named barriers: which warpgroup may start its products.
enum : uint32_t { kTurn = 1 };

// A quad's lanes hold two columns each of four neighbouring mma tiles; afterwards lane i holds all
// eight columns of tile i.
__device__ __forceinline__ uint4 transpose_quad(uint32_t (&word)[4]) {
  int const lane = ptx::thread_index() % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    bool const upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      uint32_t const sent = upper ? word[i] : word[i | bit];
      uint32_t const received = __shfl_xor_sync(0xffffffffu, sent, bit);
      (upper ? word[i] : word[i | bit]) = received;
    }
  }
  return {word[0], word[1], word[2], word[3]};
}

// Completes a warpgroup's rows and writes them and their LSE.
template <class Config>
__device__ __forceinline__ void store_output(const AttentionFwdProblem& problem,
                                             const Tile<Config>& tile, Consumer<Config>& consumer,
                                             int32_t first_row) {
  int const thread = ptx::thread_index() % 128;
  int const lane = thread % 32;
  int64_t const gLSE = (int64_t{tile.batch} * problem.heads_q + tile.head) * problem.queries.seqlen;
  uint16_t* const gO = problem.out.data + tile.batch * problem.out.batch_stride +
                       tile.head * problem.out.head_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int32_t const row = first_row + thread / 32 * 16 + half * 8 + lane / 4;
    bool const exists = row < problem.queries.seqlen;
    float lse;
    float const inverse = consumer.softmax.finish(half, problem.scale_log2, lse);
    if (problem.lse != nullptr && lane % 4 == 0 && exists) problem.lse[gLSE + row] = lse;
    uint16_t* const target = gO + row * problem.out.seq_stride;
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 4) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[i] = Config::Dtype::pack(consumer.rO[4 * (n + i) + 2 * half] * inverse,
                                      consumer.rO[4 * (n + i) + 2 * half + 1] * inverse);
      }
      uint4 const chunk = transpose_quad(word);
      int const column = (n + lane % 4) * 8;
      if (exists && column < problem.head_dim_v) {
        *reinterpret_cast<uint4*>(target + column) = chunk;
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void consume(const AttentionFwdArguments& arguments, const Mask& mask,
                                        const Smem<Config>& smem, uint32_t warpgroup) {
  uint32_t const next = (warpgroup + 1) % Config::kConsumers;
  const AttentionFwdProblem& problem = arguments.problem;
  bool const first_lane = threadIdx.x % 32 == 0;
  PipelineState k, v;
  uint32_t phase_q = 0;
  if (next == 0) ptx::named_barrier_arrive(kTurn + 0, 256);  // 0 begins
  for (Turn turn; turn.item < arguments.items; turn.advance(arguments)) {
    Tile<Config> const tile(arguments, mask, turn);
    if (!tile.exists) continue;
    Consumer<Config> consumer;
    if (tile.begin < tile.end) {
      int32_t const first_row = tile.first_query + warpgroup * 64;
      uint32_t const sQ = smem.q() + warpgroup * 64 * 128;
      auto mask_block = [&](int32_t n) {
        if (problem.score_sign != 1.f) {
#pragma unroll
          for (int i = 0; i < consumer.kScores; ++i) consumer.rS[i] *= problem.score_sign;
        }
        if (mask.hides_any(first_row, first_row + 63, n * Config::kBlockKV,
                           (n + 1) * Config::kBlockKV)) {
          consumer.apply_mask(mask, first_row, n * Config::kBlockKV);
        }
      };
      float factor[2];
      ptx::mbarrier_wait(smem.full_q(), phase_q);
      phase_q ^= 1;
      int32_t n = tile.end - 1;
      ptx::mbarrier_wait(smem.full_k(k.stage), k.phase);
      consumer.multiply_qk(sQ, smem.k(k.stage));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(consumer.rS);
      if (first_lane) ptx::mbarrier_arrive(smem.empty_k(k.stage));
      k.template advance<Config::kStages>();
      if (first_lane && n == tile.begin) ptx::mbarrier_arrive(smem.empty_q());
      mask_block(n);
      consumer.softmax_step(problem.scale_log2, factor);
      consumer.pack();
      bool accumulate = false;
      for (--n; n >= tile.begin; --n) {
        ptx::mbarrier_wait(smem.full_k(k.stage), k.phase);
        // The other warpgroup has started its products: now this one's, under its softmax.
        ptx::named_barrier_sync(kTurn + warpgroup, 256);
        consumer.multiply_qk(sQ, smem.k(k.stage));
        ptx::mbarrier_wait(smem.full_v(v.stage), v.phase);
        consumer.multiply_pv(smem.v(v.stage), accumulate);
        accumulate = true;
        ptx::named_barrier_arrive(kTurn + next, 256);
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(consumer.rS);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_k(k.stage));
        k.template advance<Config::kStages>();
        if (first_lane && n == tile.begin) ptx::mbarrier_arrive(smem.empty_q());
        mask_block(n);
        consumer.softmax_step(problem.scale_log2, factor);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(consumer.rO);
        if (first_lane) ptx::mbarrier_arrive(smem.empty_v(v.stage));
        v.template advance<Config::kStages>();
        consumer.pack();
        consumer.rescale(factor);
      }
      ptx::mbarrier_wait(smem.full_v(v.stage), v.phase);
      consumer.multiply_pv(smem.v(v.stage), accumulate);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(consumer.rO);
      if (first_lane) ptx::mbarrier_arrive(smem.empty_v(v.stage));
      v.template advance<Config::kStages>();
    } else {
#pragma unroll
      for (float& x : consumer.rO) x = 0.f;
    }
    store_output<Config>(problem, tile, consumer, tile.first_query + warpgroup * 64);
  }
  if (warpgroup == 0) ptx::named_barrier_sync(kTurn + 0, 256);  // takes the last turn
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_fwd_kernel(const __grid_constant__ AttentionFwdArguments arguments) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const AttentionFwdProblem& problem = arguments.problem;
  Smem<Config> const smem{smem_address(shared)};
  Mask const mask{problem.queries.seqlen, problem.keys.seqlen, problem.window_left,
                  problem.window_right};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.full_q(), 1);
    ptx::mbarrier_init(smem.empty_q(), 4 * Config::kConsumers);
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
    if (threadIdx.x == 0) produce<Config>(arguments, mask, smem);
  } else {
    ptx::registers_take<Config::kConsumerRegisters>();
    consume<Config>(arguments, mask, smem, threadIdx.x / 128 - 1);
  }
}

}  // namespace flashvar::sm90
