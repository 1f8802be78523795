// Attention backward with mma.sync (FlashAttention-2's schedule: Dao, 2023).
//
// A block owns kBlockKV keys of one kv head and iterates over the queries to which they are
// visible, of all query heads of the group. Scores are computed transposed, with keys as rows: here
// P and dS stand for P^T and dS^T, which are laid out as operand A of dV += P dO and dK += dS Q. dK
// and dV stay in registers to the end. Each step's dQ is added to fp32 sums in the workspace or,
// where sequences have one key tile, stored; otherwise, in deterministic mode, bwd_dq.cuh computes
// dQ. Device code only; launched by bwd_launch.cuh.
#pragma once
#include <cstdint>
#include <type_traits>

#include "attention/problem.h"
#include "core/ceil_div.h"
#include "core/math.cuh"
#include "core/quad.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"
#include "sm80/attention/bwd_config.cuh"
#include "sm80/attention/bwd_scores.cuh"
#include "sm80/attention/key_tile.cuh"
#include "sm80/epilogue.cuh"
#include "sm80/gemm.cuh"
#include "sm80/pipeline.cuh"

namespace flashvar::sm80::attention {

// load_tile() of a tensor that may be unaligned. Kernels with modifiers decide at run time; the
// others take aligned tensors only.
template <class Layout, class Config>
__device__ __forceinline__ void load_any_tile(unsigned char* smem, const uint16_t* gmem,
                                              int64_t stride, int32_t rows, int32_t head_dim,
                                              bool aligned) {
  if (!Config::kModifiers || aligned) {
    load_tile<Layout, Config::kThreads, true>(smem, gmem, stride, rows, head_dim);
  } else {
    load_tile<Layout, Config::kThreads, false>(smem, gmem, stride, rows, head_dim);
  }
}

// Copies the first `rows` rows of a shared tile to global memory, aligned or not; all warps take
// part.
template <class Layout, class Config>
__device__ __forceinline__ void store_any_tile(uint16_t* gmem, int64_t stride,
                                               const unsigned char* smem, int32_t rows,
                                               int32_t head_dim, bool aligned) {
  constexpr int kWarpRows = Layout::kRows / Config::kWarps;
  int const row = threadIdx.x / 32 * kWarpRows;
  if (!Config::kModifiers || aligned) {
    store_rows<Layout, kWarpRows, true>(gmem + row * stride, stride, smem, row, rows - row,
                                        head_dim);
  } else {
    store_rows<Layout, kWarpRows, false>(gmem + row * stride, stride, smem, row, rows - row,
                                         head_dim);
  }
}

// One buffer of a step's query operands: Q, dO, LSE and delta.
template <class Config>
struct QueryStage {
  unsigned char* q;
  unsigned char* grad_out;
  float* lse_log2;
  float* delta;

  explicit __device__ __forceinline__ QueryStage(unsigned char* smem)
      : q(smem),
        grad_out(q + Config::SmemLayoutQ::kBytes),
        lse_log2(reinterpret_cast<float*>(grad_out + Config::SmemLayoutDO::kBytes)),
        delta(lse_log2 + Config::kBlockQ) {}

  // Loads query block m of a head as a cp.async group.
  __device__ __forceinline__ void load(const BwdArgs& args, const KeyTile& tile, int32_t head,
                                       int32_t m) const {
    int32_t const first_query = m * Config::kBlockQ;
    int32_t const rows = tile.queries.count - first_query;
    load_any_tile<typename Config::SmemLayoutQ, Config>(
        q, args.q.data + tile.query_offset(args.q, head, first_query), args.q.seq_stride, rows,
        args.head_dim, args.aligned);
    load_any_tile<typename Config::SmemLayoutDO, Config>(
        grad_out, args.grad_out.data + tile.query_offset(args.grad_out, head, first_query),
        args.grad_out.seq_stride, rows, args.head_dim_v, args.aligned);
    constexpr int kUnits = Config::kBlockQ / 4;
    static_assert(2 * kUnits <= Config::kThreads, "a thread loads at most one unit");
    int const thread = ptx::thread_index();
    if (thread < 2 * kUnits) {
      int64_t const row = (head * args.query_tiles + tile.first_query_tile + m) * Config::kBlockQ;
      const float* const from = (thread < kUnits ? args.lse_log2 : args.delta) + row;
      ptx::cp_async_16(ptx::smem_address(lse_log2 + thread * 4), from + thread % kUnits * 4, true);
    }
    ptx::cp_async_commit();
  }
};

// Operand B of gemm_nn(): a tile whose rows are k, from unit `unit` on.
template <class Layout>
__device__ __forceinline__ FragmentAddress<Layout> first_columns(const unsigned char* tile,
                                                                 uint32_t unit) {
  return {Layout::advance(ptx::smem_address(tile) + fragment_offset<Layout>(), unit)};
}

// Computes P = exp2(S scale - LSE) in place.
template <class Acc>
__device__ __forceinline__ void exponentiate(Acc& rS, float scale_log2, const float* lse_log2) {
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

// Computes dS = P (dP - delta) in place of dP.
template <class Acc>
__device__ __forceinline__ void differentiate_softmax(Acc& rdP, const Acc& rP, const float* delta) {
#pragma unroll
  for (int n = 0; n < rP.kMmaCols; ++n) {
    float2 const sum = *reinterpret_cast<const float2*>(delta + n * 8);
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

// Stores dK or dV: to its tensor, through the shared tile `smem`, or, where several blocks share
// the group, adds it to the fp32 sums.
template <class Tile, class Layout, class Config, class Acc>
__device__ __forceinline__ void store_grad(const BwdArgs& args, const KeyTile& tile,
                                           const Tensor& grad, float* sums, const Acc& c,
                                           float scale, int32_t head_dim, unsigned char* smem) {
  int const warp = threadIdx.x / 32;
  if (sums != nullptr) {
    int64_t const number = tile.head_kv * args.key_tiles + tile.key_tile;
    add_to_workspace<Tile>(sums + number * Tile::kElements, c, warp);
    return;
  }
  store_accumulator<typename Config::Dtype, Layout>(
      smem, c, Tile::row(warp), scale, [&](int n) { return Tile::column(warp, n) / 8; });
  __syncthreads();  // all warps have written the shared tile
  store_any_tile<Layout, Config>(grad.data + tile.key_offset(grad), grad.seq_stride, smem,
                                 tile.key_rows - tile.first_key, head_dim, args.aligned);
}

template <class Config>
using BwdScores = Accumulator<Config::kScoreKeys, Config::kScoreQueries>;

// Where in the block's scores a warp's part begins: its first key and query.
template <class Config>
struct WarpCoordinate {
  int warp, lane, key, query;

  __device__ __forceinline__ WarpCoordinate()
      : warp(ptx::thread_index() / 32),
        lane(ptx::thread_index() % 32),
        key(warp % Config::kScoreWarps * Config::kScoreKeys),
        query(warp / Config::kScoreWarps * Config::kScoreQueries) {}
};

// Computes P and dS of query block m of a head, from S = K Q^T and dP = V dO^T (rows are keys).
template <class Config>
__device__ __forceinline__ void compute_scores(BwdScores<Config>& rS, BwdScores<Config>& rdP,
                                               const BwdArgs& args, const KeyTile& tile,
                                               int32_t head, int32_t m,
                                               const WarpCoordinate<Config>& at,
                                               const unsigned char* sK, const unsigned char* sV,
                                               const QueryStage<Config>& stage) {
  using Dtype = typename Config::Dtype;
  using LayoutQ = typename Config::SmemLayoutQ;
  using LayoutDO = typename Config::SmemLayoutDO;
  using LayoutK = typename Config::SmemLayoutK;
  using LayoutV = typename Config::SmemLayoutV;
  gemm_nt<Dtype, LayoutK, LayoutQ, Config::kHeadDim>(
      rS, ptx::smem_address(sK) + at.key * LayoutK::kRowBytes,
      ptx::smem_address(stage.q) + at.query * LayoutQ::kRowBytes);
  auto gemm_dp = [&] {
    gemm_nt<Dtype, LayoutV, LayoutDO, Config::kHeadDimV>(
        rdP, ptx::smem_address(sV) + at.key * LayoutV::kRowBytes,
        ptx::smem_address(stage.grad_out) + at.query * LayoutDO::kRowBytes);
  };
  int32_t const first_query = m * Config::kBlockQ;
  Mask const mask = tile.mask(args);
  bool const masked = mask.hides_any(first_query, first_query + Config::kBlockQ - 1, tile.first_key,
                                     tile.first_key + Config::kBlockKV);
  int const lane_query = at.query + at.lane % 4 * 2;
  BwdScoreOrigin const origin{
      tile.batch, head,  first_query + lane_query, tile.first_key + at.key + at.lane / 4,
      mask,       masked};
  if constexpr (Config::kModifiers) {
    gemm_dp();
    differentiate_with_modifiers<true, Dtype>(
        rS, rdP, args, origin,
        [&](int, int n, int e) { return stage.lse_log2[lane_query + n * 8 + e % 2]; },
        [&](int, int n, int e) { return stage.delta[lane_query + n * 8 + e % 2]; });
  } else {
    // No branch between exponentials and GEMM, so that ptxas interleaves them.
    exponentiate(rS, args.score_sign * args.scale_log2, stage.lse_log2 + lane_query);
    gemm_dp();
    if (masked) apply_mask(rS, origin);
    differentiate_softmax(rdP, rS, stage.delta + lane_query);
  }
}

// dV += P dO and dK += dS Q, with P and dS in registers or in shared memory.
template <class Config, class GradK, class GradV>
__device__ __forceinline__ void gemm_grad_kv(GradK& rdK, GradV& rdV, const BwdScores<Config>& rP,
                                             const BwdScores<Config>& rdS, const unsigned char* sP,
                                             const unsigned char* sdS, int warp,
                                             const QueryStage<Config>& stage) {
  using Dtype = typename Config::Dtype;
  using LayoutS = typename Config::SmemLayoutS;
  uint32_t const columns = warp / Config::kGradKVWarps * 2;
  uint32_t const rows = warp % Config::kGradKVWarps * Config::kGradKVRows * LayoutS::kRowBytes +
                        fragment_offset<LayoutS>();
  uint32_t const aP = ptx::smem_address(sP) + rows;
  uint32_t const adS = ptx::smem_address(sdS) + rows;
  auto load = [&](uint32_t (&a)[4], const BwdScores<Config>& scores, uint32_t address, int m,
                  int kk) {
    if constexpr (Config::kScoresInRegisters) {
      pack_a<Dtype>(a, scores, m, kk);
    } else {
      ptx::ldmatrix_x4(a, LayoutS::advance(address, 2 * kk) + m * 16 * LayoutS::kRowBytes);
    }
  };
  gemm_nn<Dtype, Config::kBlockQ, Config::kGradKVColumnWarps>(
      rdV, first_columns<typename Config::SmemLayoutDO>(stage.grad_out, columns),
      [&](uint32_t (&a)[4], int m, int kk) { load(a, rP, aP, m, kk); });
  gemm_nn<Dtype, Config::kBlockQ, Config::kGradKVColumnWarps>(
      rdK, first_columns<typename Config::SmemLayoutQ>(stage.q, columns),
      [&](uint32_t (&a)[4], int m, int kk) { load(a, rdS, adS, m, kk); });
}

template <class Config>
using GradQAccumulator = Accumulator<Config::GradQ::kWarpRows, Config::GradQ::kMmaCols * 8>;

// Computes a warp's part of dQ = dS^T K of a step.
template <class Config>
__device__ __forceinline__ GradQAccumulator<Config> compute_grad_q(const unsigned char* sdS,
                                                                   const unsigned char* sK,
                                                                   int warp) {
  using LayoutS = typename Config::SmemLayoutS;
  using GradQ = typename Config::GradQ;
  GradQAccumulator<Config> rdQ;
  rdQ.clear();
  // dS is stored with keys as rows; ldmatrix_x4_trans in B's matrix order gives operand A of dS^T.
  uint32_t const adS =
      LayoutS::advance(ptx::smem_address(sdS) + fragment_offset_b<LayoutS>(), GradQ::row(warp) / 8);
  gemm_nn<typename Config::Dtype, Config::kBlockKV, GradQ::kColWarps>(
      rdQ, first_columns<typename Config::SmemLayoutK>(sK, warp / GradQ::kRowWarps * 2),
      [&](uint32_t (&a)[4], int m, int kk) {
        ptx::ldmatrix_x4_trans(a, LayoutS::advance(adS, 2 * m) + kk * 16 * LayoutS::kRowBytes);
      });
  return rdQ;
}

// Adds dQ of query block m of a head to the sums in the workspace.
template <class Config>
__device__ __forceinline__ void add_grad_q(const BwdArgs& args, const KeyTile& tile, int32_t head,
                                           int32_t m, const unsigned char* sdS,
                                           const unsigned char* sK, int warp) {
  using GradQ = typename Config::GradQ;
  GradQAccumulator<Config> const rdQ = compute_grad_q<Config>(sdS, sK, warp);
  int64_t const number = head * args.query_tiles + tile.first_query_tile + m;
  add_to_workspace<GradQ>(args.grad_q_sum + number * GradQ::kElements, rdQ, warp);
}

// Stores dQ of query block m of a head, to which no other block adds.
template <class Config>
__device__ __forceinline__ void store_grad_q(const BwdArgs& args, const KeyTile& tile, int32_t head,
                                             int32_t m, const unsigned char* sdS,
                                             const unsigned char* sK, int warp) {
  using GradQ = typename Config::GradQ;
  GradQAccumulator<Config> const c = compute_grad_q<Config>(sdS, sK, warp);
  int const lane = ptx::thread_index() % 32;
  // With more keys max_seqlen_k was too small, and several blocks store dQ: the result is NaN.
  float const scale = tile.keys.count <= Config::kBlockKV ? args.modifiers.scale : nanf("");
  uint16_t* const to = args.grad_q.data + tile.query_offset(args.grad_q, head, m * Config::kBlockQ);
#pragma unroll
  for (int i = 0; i < 2 * c.kMmaRows; ++i) {
    int const half = i % 2, row = GradQ::row(warp) + i * 8 + lane / 4;
    bool const exists = m * Config::kBlockQ + row < tile.queries.count;
#pragma unroll
    for (int n = 0; n < c.kMmaCols; n += 4) {
      uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // The last group may have two tiles only.
        word[j] = n + j < c.kMmaCols
                      ? Config::Dtype::pack(c.tile[i / 2][n + j][2 * half] * scale,
                                            c.tile[i / 2][n + j][2 * half + 1] * scale)
                      : 0;
      }
      uint4 const unit = transpose_quad(word);
      int const column = GradQ::column(warp, n + lane % 4);
      if (!exists || n + lane % 4 >= c.kMmaCols || column >= args.head_dim) continue;
      uint16_t* const slot = to + row * args.grad_q.seq_stride + column;
      if (!Config::kModifiers || args.aligned) {
        *reinterpret_cast<uint4*>(slot) = unit;
      } else {
        store_unaligned(slot, unit);
      }
    }
  }
}

// The main kernel: dK and dV of a key tile and, unless bwd_dq.cuh computes it, its part of dQ. Over
// 100 lines, because the loop over queries is a closure over the accumulators.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSM)
    bwd_kernel(const __grid_constant__ BwdArgs args) {
  using Dtype = typename Config::Dtype;
  using LayoutK = typename Config::SmemLayoutK;
  using LayoutV = typename Config::SmemLayoutV;
  using LayoutS = typename Config::SmemLayoutS;
  using GradK = typename Config::GradK;
  using GradV = typename Config::GradV;

  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* const sK = smem;
  unsigned char* const sV = sK + LayoutK::kBytes;
  unsigned char* const sdS = sV + LayoutV::kBytes;
  unsigned char* const sP = sdS + LayoutS::kBytes;
  unsigned char* const sStages = sdS + (Config::kScoresInRegisters ? 1 : 2) * LayoutS::kBytes;
  // Constants of the main loop, in shared memory because the accumulators leave no registers for
  // them.
  KeyTile& sTile = *reinterpret_cast<KeyTile*>(sStages + Config::kStages * Config::kStageBytes);

  KeyTile const tile(args, Config::kBlockQ, Config::kBlockKV);
  if (tile.first_key >= tile.key_rows) return;
  if (ptx::thread_index() == 0) sTile = tile;
  int32_t begin = 0, steps = 0;
  if (tile.first_key < tile.keys.count) {
    Mask const mask = tile.mask(args);
    int32_t const last_key = min(tile.first_key + Config::kBlockKV, tile.keys.count) - 1;
    begin = mask.query_begin(tile.first_key) / Config::kBlockQ;
    int32_t const end = ceil_div(mask.query_end(last_key), Config::kBlockQ);
    int64_t const all = max(end - begin, 0);
    int32_t const skipped = static_cast<int32_t>(all * tile.query_part / args.query_parts);
    steps = static_cast<int32_t>(all * (tile.query_part + 1) / args.query_parts) - skipped;
    begin += skipped;
  }
  int32_t const last_step = steps * tile.heads - 1;

  Accumulator<GradK::kWarpRows, GradK::kMmaCols * 8> rdK;
  Accumulator<GradV::kWarpRows, GradV::kMmaCols * 8> rdV;
  rdK.clear();
  rdV.clear();

  if (last_step >= 0) {
    int32_t const rows = tile.keys.count - tile.first_key;
    load_any_tile<LayoutK, Config>(sK, args.k.data + tile.key_offset(args.k), args.k.seq_stride,
                                   rows, args.head_dim, args.aligned);
    load_any_tile<LayoutV, Config>(sV, args.v.data + tile.key_offset(args.v), args.v.seq_stride,
                                   rows, args.head_dim_v, args.aligned);
    QueryStage<Config>(sStages).load(args, tile, tile.first_head, begin);
  } else {
    __syncthreads();  // sTile is written
  }

  // Two instances of the loop, because a branch in it makes it slower even where it is not taken.
  // Kernels with modifiers have one, because their loop is long.
  auto iterate = [&](auto stores_dq) {
    int32_t head = tile.first_head, m = begin;
    for (int32_t step = 0; step <= last_step; ++step) {
      int32_t next_head = head, next_m = m + 1;
      if (next_m == begin + steps) {
        next_m = begin;
        ++next_head;
      }
      uint32_t const stage_offset = Config::kStages == 2 ? step % 2 * Config::kStageBytes : 0;
      QueryStage<Config> const stage(sStages + stage_offset);
      ptx::cp_async_wait<0>();
      // This step's queries (first: K, V and sTile too) are visible to all warps. All warps have
      // finished the previous step: the other stage, sP and sdS may be overwritten.
      __syncthreads();
      if (Config::kStages == 2 && step < last_step) {
        QueryStage<Config>(sStages + (Config::kStageBytes - stage_offset))
            .load(args, sTile, next_head, next_m);
      }
      WarpCoordinate<Config> const at;
      BwdScores<Config> rS, rdP;
      compute_scores<Config>(rS, rdP, args, sTile, head, m, at, sK, sV, stage);

      auto in_scores = [&](int n) { return at.query / 8 + n; };
      store_accumulator<Dtype, LayoutS>(sdS, rdP, at.key, 1.f, in_scores);
      if constexpr (!Config::kScoresInRegisters) {
        store_accumulator<Dtype, LayoutS>(sP, rS, at.key, 1.f, in_scores);
        __syncthreads();  // P and dS are visible to all warps
      }

      gemm_grad_kv<Config>(rdK, rdV, rS, rdP, sP, sdS, at.warp, stage);
      if constexpr (Config::kScoresInRegisters || Config::kStages == 1) {
        __syncthreads();  // dS is visible to all warps; all have read this step's queries
      }
      if (Config::kStages == 1 && step < last_step) {
        stage.load(args, sTile, next_head, next_m);
      }

      if (Config::kModifiers ? args.one_key_tile : stores_dq.value) {
        store_grad_q<Config>(args, sTile, head, m, sdS, sK, at.warp);
      } else if (args.grad_q_sum != nullptr) {
        add_grad_q<Config>(args, sTile, head, m, sdS, sK, at.warp);
      }
      head = next_head;
      m = next_m;
    }
  };
  if (!Config::kModifiers && args.one_key_tile) {
    iterate(std::true_type{});
  } else {
    iterate(std::false_type{});
  }

  __syncthreads();  // all warps have read K and V, whose buffers dK and dV now take
  store_grad<GradK, LayoutK, Config>(args, sTile, args.grad_k, args.grad_k_sum, rdK,
                                     args.modifiers.scale, args.head_dim, sK);
  store_grad<GradV, LayoutV, Config>(args, sTile, args.grad_v, args.grad_v_sum, rdV, 1.f,
                                     args.head_dim_v, sV);
}

}  // namespace flashvar::sm80::attention
