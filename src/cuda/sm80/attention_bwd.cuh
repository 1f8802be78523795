// Attention backward with mma.sync (FlashAttention-2's schedule: Dao, 2023).
//
// A block owns kBlockKV keys of one kv head and walks the queries that see them, of all query heads
// of the group. The scores are computed transposed, keys by queries, so that P and dS are where the
// products for dV and dK want them. dK and dV stay in registers to the end; each step's dQ is added
// to a sum in the workspace (in deterministic mode attention_bwd_queries.cuh computes dQ instead).
// Device code only; the launch is in attention_bwd_launch.cuh.
#pragma once
#include <cstdint>

#include "core/online_softmax.cuh"
#include "core/problem.h"
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"
#include "sm80/attention_bwd_block.cuh"
#include "sm80/attention_bwd_config.cuh"
#include "sm80/attention_bwd_products.cuh"
#include "sm80/attention_bwd_scores.cuh"
#include "sm80/tiles.cuh"

namespace flashvar::sm80 {

// Kernels with features serve unaligned tensors as well: their copies are synchronous.
template <class Layout, class Config>
__device__ __forceinline__ void load_any_tile(unsigned char* smem, const uint16_t* gmem,
                                              int64_t stride, int32_t rows, int32_t head_dim,
                                              bool aligned) {
  if (!Config::kFeatures || aligned) {
    load_tile<Layout, Config::kThreads, true>(smem, gmem, stride, rows, head_dim);
  } else {
    load_tile<Layout, Config::kThreads, false>(smem, gmem, stride, rows, head_dim);
  }
}

// The rows of a tile of keys that are there, by all warps.
template <class Layout, class Config>
__device__ __forceinline__ void store_any_tile(uint16_t* gmem, int64_t stride,
                                               const unsigned char* smem, int32_t rows,
                                               int32_t head_dim, bool aligned) {
  constexpr int kWarpRows = Layout::kRows / Config::kWarps;
  int const row = threadIdx.x / 32 * kWarpRows;
  if (!Config::kFeatures || aligned) {
    store_rows<Layout, kWarpRows, true>(gmem + row * stride, stride, smem, row, rows - row,
                                        head_dim);
  } else {
    store_rows<Layout, kWarpRows, false>(gmem + row * stride, stride, smem, row, rows - row,
                                         head_dim);
  }
}

// One buffer of what a step reads of its queries.
template <class Config>
struct QueryStage {
  unsigned char* q;
  unsigned char* grad_out;
  float* lse_log2;
  float* row_sums;

  explicit __device__ __forceinline__ QueryStage(unsigned char* smem)
      : q(smem),
        grad_out(q + Config::SmemLayoutQ::kBytes),
        lse_log2(reinterpret_cast<float*>(grad_out + Config::SmemLayoutDO::kBytes)),
        row_sums(lse_log2 + Config::kBlockQ) {}

  // Starts the copies of query block m of a head.
  __device__ __forceinline__ void load(const AttentionBwdArguments& args, const KeyBlock& block,
                                       int32_t head, int32_t m) const {
    int32_t const first_query = m * Config::kBlockQ;
    int32_t const rows = block.queries.count - first_query;
    load_any_tile<typename Config::SmemLayoutQ, Config>(
        q, args.q.data + block.query_offset(args.q, head, first_query), args.q.seq_stride, rows,
        args.head_dim, args.aligned);
    load_any_tile<typename Config::SmemLayoutDO, Config>(
        grad_out, args.grad_out.data + block.query_offset(args.grad_out, head, first_query),
        args.grad_out.seq_stride, rows, args.head_dim_v, args.aligned);
    constexpr int kChunks = Config::kBlockQ / 4;
    static_assert(2 * kChunks <= Config::kThreads, "a thread copies at most one chunk");
    int const thread = ptx::thread_index();
    if (thread < 2 * kChunks) {
      int64_t const row = (head * args.query_tiles + block.first_query_tile + m) * Config::kBlockQ;
      const float* const from = (thread < kChunks ? args.lse_log2 : args.row_sums) + row;
      ptx::cp_async_16(ptx::smem_address(lse_log2 + thread * 4), from + thread % kChunks * 4, true);
    }
    ptx::cp_async_commit();
  }
};

// P, by registers, from q . k.
template <class Accumulator>
__device__ __forceinline__ void exponentiate(Accumulator& rS, float scale_log2,
                                             const float* lse_log2) {
#pragma unroll
  for (int n = 0; n < rS.kMmaCols; ++n) {
    float2 const lse = *reinterpret_cast<const float2*>(lse_log2 + n * 8);
#pragma unroll
    for (int m = 0; m < rS.kMmaRows; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = rS.tile[m][n][e];
        s = exp2_approx(s * scale_log2 - (e % 2 == 0 ? lse.x : lse.y));
      }
    }
  }
}

// dS = P (dP - D).
template <class Accumulator>
__device__ __forceinline__ void differentiate_softmax(Accumulator& rdP, const Accumulator& rP,
                                                      const float* row_sums) {
#pragma unroll
  for (int n = 0; n < rP.kMmaCols; ++n) {
    float2 const sum = *reinterpret_cast<const float2*>(row_sums + n * 8);
#pragma unroll
    for (int m = 0; m < rP.kMmaRows; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& grad = rdP.tile[m][n][e];
        grad = rP.tile[m][n][e] * (grad - (e % 2 == 0 ? sum.x : sum.y));
      }
    }
  }
}

// Completes dK or dV: into the tensor by way of the tile `smem`, or into the group's sum.
template <class Tile, class Layout, class Config, class Accumulator>
__device__ __forceinline__ void store_grad(const AttentionBwdArguments& args, const KeyBlock& block,
                                           const TensorView& grad, float* sums,
                                           const Accumulator& c, float scale, int32_t head_dim,
                                           unsigned char* smem) {
  int const warp = threadIdx.x / 32;
  if (sums != nullptr) {
    int64_t const tile = block.head_kv * args.key_tiles + block.key_tile;
    add_to_workspace<Tile>(sums + tile * Tile::kElements, c, warp);
    return;
  }
  store_fragment<typename Config::Dtype, Layout>(smem, c, Tile::row(warp), scale,
                                                 [&](int n) { return Tile::column(warp, n) / 8; });
  __syncthreads();  // the tile is complete
  store_any_tile<Layout, Config>(grad.data + block.key_offset(grad), grad.seq_stride, smem,
                                 block.key_rows - block.first_key, head_dim, args.aligned);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSM)
    attention_bwd_kernel(const __grid_constant__ AttentionBwdArguments args) {
  using Dtype = typename Config::Dtype;
  using LayoutQ = typename Config::SmemLayoutQ;
  using LayoutDO = typename Config::SmemLayoutDO;
  using LayoutK = typename Config::SmemLayoutK;
  using LayoutV = typename Config::SmemLayoutV;
  using LayoutS = typename Config::SmemLayoutS;
  using Scores = Fragment<Config::kScoreKeys, Config::kScoreQueries>;
  using GradQ = typename Config::GradQ;
  using GradK = typename Config::GradK;
  using GradV = typename Config::GradV;

  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* const sK = smem;
  unsigned char* const sV = sK + LayoutK::kBytes;
  unsigned char* const sdS = sV + LayoutV::kBytes;
  unsigned char* const sP = sdS + LayoutS::kBytes;
  unsigned char* const sStages = sdS + (Config::kScoresInRegisters ? 1 : 2) * LayoutS::kBytes;
  // The loop reads here what its accumulators leave no registers for.
  KeyBlock& sBlock = *reinterpret_cast<KeyBlock*>(sStages + Config::kStages * Config::kStageBytes);

  KeyBlock const block(args, Config::kBlockQ, Config::kBlockKV);
  if (block.first_key >= block.key_rows) return;
  if (ptx::thread_index() == 0) sBlock = block;
  int32_t begin = 0, steps = 0;
  if (block.first_key < block.keys.count) {
    Mask const mask = block.mask(args);
    int32_t const last_key = min(block.first_key + Config::kBlockKV, block.keys.count) - 1;
    begin = mask.seeing_begin(block.first_key) / Config::kBlockQ;
    int32_t const end = (mask.seeing_end(last_key) + Config::kBlockQ - 1) / Config::kBlockQ;
    steps = max(end - begin, 0);
  }
  int32_t const last_step = steps * block.heads - 1;

  Fragment<GradK::kWarpRows, GradK::kMmaCols * 8> rdK;
  Fragment<GradV::kWarpRows, GradV::kMmaCols * 8> rdV;
  rdK.clear();
  rdV.clear();

  if (last_step >= 0) {
    int32_t const rows = block.keys.count - block.first_key;
    load_any_tile<LayoutK, Config>(sK, args.k.data + block.key_offset(args.k), args.k.seq_stride,
                                   rows, args.head_dim, args.aligned);
    load_any_tile<LayoutV, Config>(sV, args.v.data + block.key_offset(args.v), args.v.seq_stride,
                                   rows, args.head_dim_v, args.aligned);
    QueryStage<Config>(sStages).load(args, block, block.first_head, begin);
  } else {
    __syncthreads();  // sBlock is there for all
  }

  int32_t head = block.first_head, m = begin;
  for (int32_t step = 0; step <= last_step; ++step) {
    int32_t next_head = head, next_m = m + 1;
    if (next_m == begin + steps) {
      next_m = begin;
      ++next_head;
    }
    uint32_t const stage_offset = Config::kStages == 2 ? step % 2 * Config::kStageBytes : 0;
    QueryStage<Config> const stage(sStages + stage_offset);
    ptx::cp_async_wait<0>();
    __syncthreads();  // this step's queries, and at first K, V and sBlock, are there for all; all
                      // are done with the step before
    if (Config::kStages == 2 && step < last_step) {
      QueryStage<Config>(sStages + (Config::kStageBytes - stage_offset))
          .load(args, sBlock, next_head, next_m);
    }
    int const warp = ptx::thread_index() / 32;
    int const lane = ptx::thread_index() % 32;
    int const score_key = warp % Config::kScoreWarps * Config::kScoreKeys;
    int const score_query = warp / Config::kScoreWarps * Config::kScoreQueries;

    Scores rS, rdP;
    multiply_rows<Dtype, LayoutK, LayoutQ, Config::kHeadDim>(
        rS, ptx::smem_address(sK) + score_key * LayoutK::kRowBytes,
        ptx::smem_address(stage.q) + score_query * LayoutQ::kRowBytes);
    auto multiply_grad_out = [&] {
      multiply_rows<Dtype, LayoutV, LayoutDO, Config::kHeadDimV>(
          rdP, ptx::smem_address(sV) + score_key * LayoutV::kRowBytes,
          ptx::smem_address(stage.grad_out) + score_query * LayoutDO::kRowBytes);
    };
    int32_t const first_query = m * Config::kBlockQ;
    Mask const mask = sBlock.mask(args);
    bool const masked = mask.hides_any(first_query, first_query + Config::kBlockQ - 1,
                                       sBlock.first_key, sBlock.first_key + Config::kBlockKV);
    int const lane_query = score_query + lane % 4 * 2;
    ScorePlace const place{
        sBlock.batch, head,  first_query + lane_query, sBlock.first_key + score_key + lane / 4,
        mask,         masked};
    if constexpr (Config::kFeatures) {
      multiply_grad_out();
      differentiate<true, Dtype>(
          rS, rdP, args, place,
          [&](int, int n, int e) { return stage.lse_log2[lane_query + n * 8 + e % 2]; },
          [&](int, int n, int e) { return stage.row_sums[lane_query + n * 8 + e % 2]; });
    } else {
      // No branch between the two, so that the exponentials run beside the product.
      exponentiate(rS, args.score_sign * args.scale_log2, stage.lse_log2 + lane_query);
      multiply_grad_out();
      if (masked) hide_queries(rS, place);
      differentiate_softmax(rdP, rS, stage.row_sums + lane_query);
    }

    auto in_scores = [&](int n) { return score_query / 8 + n; };
    store_fragment<Dtype, LayoutS>(sdS, rdP, score_key, 1.f, in_scores);
    if constexpr (!Config::kScoresInRegisters) {
      store_fragment<Dtype, LayoutS>(sP, rS, score_key, 1.f, in_scores);
      __syncthreads();  // P and dS are there for all
    }

    {
      uint32_t const columns = warp / Config::kGradKVWarps * 2;
      uint32_t const rows = warp % Config::kGradKVWarps * Config::kGradKVRows * LayoutS::kRowBytes +
                            fragment_offset<LayoutS>();
      uint32_t const aP = ptx::smem_address(sP) + rows;
      uint32_t const adS = ptx::smem_address(sdS) + rows;
      auto load_p = [&](uint32_t (&a)[4], int m, int kk) {
        if constexpr (Config::kScoresInRegisters) {
          pack_operand<Dtype>(a, rS, m, kk);
        } else {
          ptx::ldmatrix_x4(a, LayoutS::advance(aP, 2 * kk) + m * 16 * LayoutS::kRowBytes);
        }
      };
      auto load_ds = [&](uint32_t (&a)[4], int m, int kk) {
        if constexpr (Config::kScoresInRegisters) {
          pack_operand<Dtype>(a, rdP, m, kk);
        } else {
          ptx::ldmatrix_x4(a, LayoutS::advance(adS, 2 * kk) + m * 16 * LayoutS::kRowBytes);
        }
      };
      multiply_columns<Dtype, LayoutDO, Config::kBlockQ, Config::kGradKVColumnWarps>(
          rdV,
          LayoutDO::advance(ptx::smem_address(stage.grad_out) + fragment_offset<LayoutDO>(),
                            columns),
          load_p);
      multiply_columns<Dtype, LayoutQ, Config::kBlockQ, Config::kGradKVColumnWarps>(
          rdK, LayoutQ::advance(ptx::smem_address(stage.q) + fragment_offset<LayoutQ>(), columns),
          load_ds);
    }
    if constexpr (Config::kScoresInRegisters || Config::kStages == 1) {
      __syncthreads();  // dS is there for all; all are done with this step's queries
    }
    if (Config::kStages == 1 && step < last_step) {
      stage.load(args, sBlock, next_head, next_m);
    }

    if (args.grad_q_sum != nullptr) {
      Fragment<GradQ::kWarpRows, GradQ::kMmaCols * 8> rdQ;
      rdQ.clear();
      // Read transposed, rows of keys give operand a as rows of queries would operand b.
      uint32_t const adS = LayoutS::advance(ptx::smem_address(sdS) + fragment_offset_b<LayoutS>(),
                                            GradQ::row(warp) / 8);
      multiply_columns<Dtype, LayoutK, Config::kBlockKV, GradQ::kColWarps>(
          rdQ,
          LayoutK::advance(ptx::smem_address(sK) + fragment_offset<LayoutK>(),
                           warp / GradQ::kRowWarps * 2),
          [&](uint32_t (&a)[4], int m, int kk) {
            ptx::ldmatrix_x4_trans(a, LayoutS::advance(adS, 2 * m) + kk * 16 * LayoutS::kRowBytes);
          });
      int64_t const tile = head * args.query_tiles + sBlock.first_query_tile + m;
      add_to_workspace<GradQ>(args.grad_q_sum + tile * GradQ::kElements, rdQ, warp);
    }
    head = next_head;
    m = next_m;
  }

  __syncthreads();  // all are done with K and V, which dK and dV now take
  store_grad<GradK, LayoutK, Config>(args, sBlock, args.grad_k, args.grad_k_sum, rdK,
                                     args.features.scale, args.head_dim, sK);
  store_grad<GradV, LayoutV, Config>(args, sBlock, args.grad_v, args.grad_v_sum, rdV, 1.f,
                                     args.head_dim_v, sV);
}

}  // namespace flashvar::sm80
