// Attention forward with mma.sync (FlashAttention-2's schedule: Dao, 2023).
//
// A block owns kBlockQ query rows of one head and iterates over the key blocks from the last to the
// first, so that the partial block and the diagonal come first. A warp owns some of the rows and
// all columns: the softmax needs no exchange between warps, and P goes from accumulators to
// operands in registers. K and V have one buffer each: V(n) is loaded during S(n) = Q K(n)^T,
// K(n-1) during the softmax and P V. Device code only; launched by fwd_launch.cuh.
#pragma once
#include <cstdint>

#include "attention/online_softmax.cuh"
#include "attention/outside_rows.cuh"
#include "attention/problem.h"
#include "attention/sinks.cuh"
#include "ptx/block_barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/special_registers.cuh"
#include "sm80/attention/fwd_config.cuh"
#include "sm80/attention/fwd_scores.cuh"
#include "sm80/attention/query_tile.cuh"
#include "sm80/epilogue.cuh"
#include "sm80/gemm.cuh"
#include "sm80/pipeline.cuh"

namespace flashvar::sm80::attention {

template <class Config>
using Softmax = OnlineSoftmax<2 * Scores<Config>::kMmaRows>;

inline constexpr bool kFullBlock = true;  // load_block: every key of the block exists

// Loads key block n of K or V as a cp.async group. `keys`: of the sequence; not read with kAllRows.
template <class Layout, int kThreads, bool kAligned, bool kAllRows = false>
__device__ __forceinline__ void load_block(unsigned char* smem, const uint16_t* gmem,
                                           int64_t stride, int32_t n, int32_t keys,
                                           int32_t head_dim) {
  int32_t const first_key = n * Layout::kRows;
  load_tile<Layout, kThreads, kAligned, kAllRows>(smem, gmem + first_key * stride, stride,
                                                  keys - first_key, head_dim);
  ptx::cp_async_commit();
}

// As load_tile() of Q, for PackGQA of several queries (KeySplits). `gmem`: the tile's first query
// of the group's first member.
template <class Layout, int kThreads>
__device__ __forceinline__ void load_members(unsigned char* smem, const FwdProblem& problem,
                                             const uint16_t* gmem, int32_t rows) {
  const KeySplits& splits = problem.splits;
  constexpr int kUnits = Layout::kColBlocks * Layout::kColBlockUnits;  // of a row
#pragma unroll 1
  for (int i = ptx::thread_index(); i < Layout::kRows * kUnits; i += kThreads) {
    int const row = i / kUnits, unit = i % kUnits;
    int32_t const member = row & (splits.group_rows - 1);
    int const col_block = unit / Layout::kColBlockUnits;
    bool const valid =
        row < rows && member < splits.members && unit * kUnitElements < problem.head_dim;
    const uint16_t* const from = gmem + (row >> splits.row_shift) * problem.q.seq_stride +
                                 member * splits.member_stride + unit * kUnitElements;
    ptx::cp_async_16(
        ptx::smem_address(smem + Layout::unit_offset(row, unit % Layout::kColBlockUnits) +
                          col_block * Layout::kColBlockBytes),
        valid ? from : gmem, valid);
  }
}

// rS = Q K^T; `sQ`: address of the warp's first row.
template <class Config>
__device__ __forceinline__ void gemm_qk(Scores<Config>& rS, const unsigned char* sQ,
                                        const unsigned char* sK) {
  using LayoutQ = typename Config::SmemLayoutQ;
  using LayoutK = typename Config::SmemLayoutK;
  gemm_nt<typename Config::Dtype, Config::kHeadDim>(
      rS, FragmentOffset<LayoutQ>{ptx::smem_address(sQ), fragment_offset<LayoutQ>()},
      FragmentOffset<LayoutK>{ptx::smem_address(sK), fragment_offset_b<LayoutK>()});
}

// rO += P V.
template <class Config>
__device__ __forceinline__ void gemm_pv(Output<Config>& rO, const Scores<Config>& rP,
                                        const unsigned char* sV) {
  using Dtype = typename Config::Dtype;
  using LayoutV = typename Config::SmemLayoutV;
  gemm_nn<Dtype, Config::kBlockKV, 1>(
      rO, FragmentOffset<LayoutV>{ptx::smem_address(sV), fragment_offset<LayoutV>()},
      [&](uint32_t (&a)[4], int m, int kk) { pack_a<Dtype>(a, rP, m, kk); });
}

// Computes P from S in rS, relative to the running maximum. Rescales rO where that changed; skipped
// when every factor in the warp is 1 (the common case after the first blocks).
template <class Config>
__device__ __forceinline__ void softmax_step(Softmax<Config>& softmax, Scores<Config>& rS,
                                             Output<Config>& rO, float scale_log2) {
  float factor[Softmax<Config>::kRows];
  float shift[Softmax<Config>::kRows];
  bool moved = false;
#pragma unroll
  for (int r = 0; r < softmax.kRows; ++r) {
    float block_max = -infinity();
#pragma unroll
    for (int n = 0; n < rS.kMmaCols; ++n) {
      const float (&pair)[4] = rS.tile[r / 2][n];
      block_max = fmaxf(block_max, fmaxf(pair[r % 2 * 2], pair[r % 2 * 2 + 1]));
    }
    factor[r] = softmax.advance(r, block_max, scale_log2, shift[r]);
    moved |= factor[r] != 1.f;
  }
  if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
    for (int r = 0; r < softmax.kRows; ++r) {
#pragma unroll
      for (int n = 0; n < rO.kMmaCols; ++n) {
        rO.tile[r / 2][n][r % 2 * 2] *= factor[r];
        rO.tile[r / 2][n][r % 2 * 2 + 1] *= factor[r];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < softmax.kRows; ++r) {
#pragma unroll
    for (int n = 0; n < rS.kMmaCols; ++n) {
#pragma unroll
      for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) {
        float& score = rS.tile[r / 2][n][e];
        score = exp2_approx(score * scale_log2 - shift[r]);
        softmax.row_sum[r] += score;
      }
    }
  }
}

// Normalizes the warp's rows of a split's output, and stores them and their LSE in fp32 for
// fwd_merge_kernel.
template <class Config>
__device__ __forceinline__ void store_split(const FwdProblem& problem, Softmax<Config>& softmax,
                                            const Output<Config>& rO, const QueryTile& tile) {
  int const lane = threadIdx.x % 32;
  int const warp_row = threadIdx.x / 32 * Config::kWarpRows;
  int32_t const rows = tile.queries.count - tile.first_query - warp_row;
  int64_t const first = tile.lse_offset<true>(problem) + warp_row;
  static_assert(!Config::kModifiers);
#pragma unroll
  for (int m = 0; m < rO.kMmaRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_lse;
      float const inverse = softmax.finish(m * 2 + half, problem.scale_log2, row_lse);
      int const row = m * 16 + half * 8 + lane / 4;
      if (row >= rows) continue;
      if (lane % 4 == 0) problem.splits.lse[first + row] = row_lse;
      float* const to = problem.splits.out + (first + row) * problem.head_dim_v + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < rO.kMmaCols; ++n) {
        if (n * 8 >= problem.head_dim_v) break;
        *reinterpret_cast<float2*>(to + n * 8) = {rO.tile[m][n][half * 2] * inverse,
                                                  rO.tile[m][n][half * 2 + 1] * inverse};
      }
    }
  }
}

// Normalizes the warp's rows of the output and stores them and their LSE. The output goes through
// the warp's rows of the shared tile sO, so that global stores are 16 bytes wide.
template <class Config, bool kAligned>
__device__ __forceinline__ void store_output(const FwdProblem& problem, Softmax<Config>& softmax,
                                             const Output<Config>& rO, const QueryTile& tile,
                                             unsigned char* sO) {
  using LayoutO = typename Config::SmemLayoutO;
  int const lane = threadIdx.x % 32;
  int const warp_row = threadIdx.x / 32 * Config::kWarpRows;
  int32_t const rows = tile.queries.count - tile.first_query - warp_row;
  float* const gLSE = problem.lse + tile.lse_offset(problem) + warp_row;
  uint16_t* const gO =
      problem.out.data + tile.query_offset(problem.out) + warp_row * problem.out.seq_stride;
  float const scale_log2 = Config::kModifiers ? kLog2E : problem.scale_log2;
  float const sink = sink_of(problem.sinks, tile.head);
#pragma unroll
  for (int m = 0; m < rO.kMmaRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_lse;
      float inverse = softmax.finish(m * 2 + half, scale_log2, row_lse);
      add_sink(sink, row_lse, inverse);
      if constexpr (Config::kModifiers) inverse *= problem.modifiers.dropout_scale;
      int const row = m * 16 + half * 8 + lane / 4;
      if (problem.lse != nullptr && lane % 4 == 0 && row < rows) gLSE[row] = row_lse;
#pragma unroll
      for (int n = 0; n < rO.kMmaCols; ++n) {
        uint32_t const offset = LayoutO::unit_offset(warp_row + row, n % LayoutO::kColBlockUnits) +
                                n / LayoutO::kColBlockUnits * LayoutO::kColBlockBytes +
                                lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(sO + offset) = Config::Dtype::pack(
            rO.tile[m][n][half * 2] * inverse, rO.tile[m][n][half * 2 + 1] * inverse);
      }
    }
  }
  __syncwarp();  // all lanes have written their part of the warp's rows
  store_rows<LayoutO, Config::kWarpRows, kAligned>(gO, problem.out.seq_stride, sO, warp_row, rows,
                                                   problem.head_dim_v);
}

// The forward kernel. Config::kModifiers: it evaluates ScoreModifiers. kAligned: every row starts
// at a multiple of 16 bytes. Windows and varlen are run-time branches outside the main loop's
// common path. Split-KV is a compile-time variant (kSplits) instead: even code outside the loop
// makes the loop slower.
template <class Config, bool kAligned>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSM)
    fwd_kernel(const __grid_constant__ FwdProblem problem) {
  using LayoutQ = typename Config::SmemLayoutQ;
  using LayoutK = typename Config::SmemLayoutK;
  using LayoutV = typename Config::SmemLayoutV;
  constexpr int kThreads = Config::kThreads;
  constexpr int kBlockKV = Config::kBlockKV;

  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* const sQ = smem;
  unsigned char* const sK = sQ + LayoutQ::kBytes;
  unsigned char* const sV = sK + LayoutK::kBytes;
  unsigned char* const sO = smem;  // overlays Q and K
  SharedQueryTile& shared = *reinterpret_cast<SharedQueryTile*>(sV + LayoutV::kBytes);

  QueryTile const tile(problem, Config::kBlockQ, std::bool_constant<Config::kSplits>{});
  int32_t const queries = min(tile.queries.count - tile.first_query, Config::kBlockQ);
  if (queries <= 0) {
    if (tile.is_spare) {
      store_outside_rows(problem, tile.head, threadIdx.x / 32, blockDim.x / 32);
    }
    return;
  }
  KeyBlockRange const blocks = tile.key_blocks<Config::kSplits>(problem, Config::kBlockQ, kBlockKV);
  const uint16_t* const gK = problem.k.data + tile.key_offset(problem.k, problem.group);
  const uint16_t* const gV = problem.v.data + tile.key_offset(problem.v, problem.group);
  if (ptx::thread_index() == 0) shared = {tile, blocks, gK, gV};

  int const warp_row = ptx::thread_index() / 32 * Config::kWarpRows;

  Output<Config> rO;
  rO.clear();
  Softmax<Config> softmax;

  if (blocks.end > blocks.begin) {
    const uint16_t* const gQ = problem.q.data + tile.q_offset<Config::kSplits>(problem);
    if (Config::kSplits && problem.splits.row_shift > 0) {
      load_members<LayoutQ, kThreads>(sQ, problem, gQ, queries);
    } else {
      load_tile<LayoutQ, kThreads, kAligned>(sQ, gQ, problem.q.seq_stride, queries,
                                             problem.head_dim);
    }
    load_block<LayoutK, kThreads, kAligned>(sK, gK, problem.k.seq_stride, blocks.end - 1,
                                            tile.keys.count, problem.head_dim);
  } else {
    __syncthreads();  // `shared` is written
  }
  auto load_v = [&](int32_t n) {
    ptx::cp_async_wait<0>();
    // K(n) is visible to all warps (in the first step, Q and `shared` too). All warps have read
    // V(n+1), whose buffer takes V(n).
    ptx::block_barrier_sync();
    load_block<LayoutV, kThreads, kAligned>(sV, shared.gV, problem.v.seq_stride, n,
                                            shared.tile.keys.count, problem.head_dim_v);
  };
  auto load_next_k = [&](int32_t n) {
    ptx::cp_async_wait<0>();
    // V(n) is visible to all warps. All warps have read K(n), and in the last step Q for the last
    // time. K(n-1) then takes the buffer of K(n), or O takes both buffers.
    ptx::block_barrier_sync();
    if (n == blocks.begin) return;
    if constexpr (Config::kModifiers) {
      prefetch_bias<Config>(problem, shared.tile, (n - 1) * kBlockKV);
    }
    load_block<LayoutK, kThreads, kAligned, kFullBlock>(sK, shared.gK, problem.k.seq_stride, n - 1,
                                                        0, problem.head_dim);
  };
  int32_t n = blocks.end - 1;
  // Key blocks that only other warps' rows see: this warp takes part in loads and barriers, and
  // computes nothing.
  if constexpr (Config::kSkips) {
    int32_t const own_end =
        tile.key_blocks_end<Config::kSplits>(problem, warp_row, Config::kWarpRows, kBlockKV);
#pragma unroll 1
    for (; n >= max(own_end, blocks.begin); --n) {
      load_v(n);
      load_next_k(n);
    }
  }
  for (; n >= blocks.begin; --n) {
    load_v(n);
    Scores<Config> rS;
    gemm_qk<Config>(rS, sQ + warp_row * LayoutQ::kRowBytes, sK);

    load_next_k(n);

    if constexpr (Config::kModifiers) {
      modify_scores<Config>(rS, problem, shared.tile, warp_row, n * kBlockKV);
    } else if (problem.score_sign != 1.f) {
      apply_sign<Config>(rS, problem.score_sign);
    }
    if (shared.key_blocks.needs_mask(n)) {
      apply_mask<Config>(rS, problem, shared.tile, warp_row, n * kBlockKV);
    }
    softmax_step<Config>(softmax, rS, rO, Config::kModifiers ? kLog2E : problem.scale_log2);
    if constexpr (Config::kModifiers) {
      apply_dropout<Config>(rS, problem, shared.tile, warp_row, n * kBlockKV);
    }
    gemm_pv<Config>(rO, rS, sV);
  }

  if constexpr (Config::kSplits) {
    store_split<Config>(problem, softmax, rO, shared.tile);
  } else {
    store_output<Config, kAligned>(problem, softmax, rO, shared.tile, sO);
  }
}

}  // namespace flashvar::sm80::attention
