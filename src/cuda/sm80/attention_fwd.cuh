// Attention forward with mma.sync (FlashAttention-2's schedule: Dao, 2023).
//
// A block owns kBlockQ query rows of one head and walks the keys from the last block to the first,
// so that the ragged block and the diagonal come first. A warp owns its rows and all columns: the
// softmax needs no word from other warps, and P goes from accumulators to operands in registers.
// K and V have one buffer each: V(n) arrives while S is computed, K(n - 1) while the softmax and
// P V are. Device code only; the launch is in attention_fwd_launch.cuh.
#pragma once
#include <cstdint>

#include "core/mask.cuh"
#include "core/online_softmax.cuh"
#include "core/problem.h"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/special_registers.cuh"
#include "sm80/config.cuh"
#include "sm80/tiles.cuh"

namespace flashvar::sm80 {

// Which rows of which head a block computes. Blocks lie on the grid's x alone (y and z end at
// 65,535), the query block fastest and the last one first: under a causal mask it has the most to
// do.
struct BlockPosition {
  uint32_t batch, head;
  int32_t first_query;

  __device__ __forceinline__ BlockPosition(const AttentionFwdProblem& problem, int32_t rows) {
    uint32_t const block = ptx::block_index();
    uint32_t const blocks_q = (problem.queries.seqlen + rows - 1) / rows;
    uint32_t const head_and_batch = block / blocks_q;
    batch = head_and_batch / problem.heads_q;
    head = head_and_batch % problem.heads_q;
    first_query = (blocks_q - 1 - block % blocks_q) * rows;
  }

  // Of the block's first row in a tensor of queries.
  __device__ __forceinline__ int64_t offset(const TensorView& tensor) const {
    return batch * tensor.batch_stride + head * tensor.head_stride +
           first_query * tensor.seq_stride;
  }

  __device__ __forceinline__ int64_t lse_row(const AttentionFwdProblem& problem) const {
    return (static_cast<int64_t>(batch) * problem.heads_q + head) * problem.queries.seqlen +
           first_query;
  }
};

// Accumulators of a warp: kWarpRows x kCols as mma tiles of 16 x 8.
template <class Config, int kCols>
struct Accumulator {
  static constexpr int kMmaRows = Config::kWarpRows / 16;
  static constexpr int kMmaCols = kCols / 8;
  float tile[kMmaRows][kMmaCols][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kMmaRows; ++m) {
#pragma unroll
      for (int n = 0; n < kMmaCols; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) tile[m][n][e] = 0.f;
      }
    }
  }
};

template <class Config>
using Scores = Accumulator<Config, Config::kBlockKV>;
template <class Config>
using Output = Accumulator<Config, Config::kHeadDim>;
template <class Config>
using Softmax = OnlineSoftmax<2 * Scores<Config>::kMmaRows>;

// rS = Q K^T; `sQ` points at the warp's first row.
template <class Config>
__device__ __forceinline__ void multiply_qk(Scores<Config>& rS, const unsigned char* sQ,
                                            const unsigned char* sK) {
  using LayoutQ = typename Config::SmemLayoutQ;
  using LayoutK = typename Config::SmemLayoutKV;
  uint32_t const aQ = ptx::smem_address(sQ);
  uint32_t const aK = ptx::smem_address(sK);
  uint32_t const offset_q = fragment_offset<LayoutQ>();
  uint32_t const offset_k = fragment_offset<LayoutK>();
  rS.clear();
#pragma unroll
  for (int kk = 0; kk < Config::kHeadDim / 16; ++kk) {
    uint32_t rQ[Scores<Config>::kMmaRows][4];
#pragma unroll
    for (int m = 0; m < rS.kMmaRows; ++m) {
      ptx::ldmatrix_x4(rQ[m],
                       aQ + LayoutQ::advance(offset_q, 2 * kk) + m * 16 * LayoutQ::kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < rS.kMmaCols; n += 2) {
      uint32_t rK[4];
      ptx::ldmatrix_x4(rK, aK + LayoutK::advance(offset_k, 2 * kk) + n * 8 * LayoutK::kRowBytes);
#pragma unroll
      for (int m = 0; m < rS.kMmaRows; ++m) {
        ptx::mma_m16n8k16<typename Config::Dtype>(rS.tile[m][n], rQ[m], rK[0], rK[2]);
        ptx::mma_m16n8k16<typename Config::Dtype>(rS.tile[m][n + 1], rQ[m], rK[1], rK[3]);
      }
    }
  }
}

// rO += P V. Two neighbouring accumulator tiles of P hold what one operand of 16 x 16 wants.
template <class Config>
__device__ __forceinline__ void multiply_pv(Output<Config>& rO, const Scores<Config>& rP,
                                            const unsigned char* sV) {
  using LayoutV = typename Config::SmemLayoutKV;
  using Dtype = typename Config::Dtype;
  uint32_t const aV = ptx::smem_address(sV);
  uint32_t const offset_v = fragment_offset<LayoutV>();
#pragma unroll
  for (int kk = 0; kk < Config::kBlockKV / 16; ++kk) {
    uint32_t a[Scores<Config>::kMmaRows][4];
#pragma unroll
    for (int m = 0; m < rP.kMmaRows; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = rP.tile[m][2 * kk + i / 2];
        a[m][i] = Dtype::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < rO.kMmaCols; n += 2) {
      uint32_t rV[4];
      ptx::ldmatrix_x4_trans(rV, aV + LayoutV::advance(offset_v, n) + kk * 16 * LayoutV::kRowBytes);
#pragma unroll
      for (int m = 0; m < rP.kMmaRows; ++m) {
        ptx::mma_m16n8k16<Dtype>(rO.tile[m][n], a[m], rV[0], rV[1]);
        ptx::mma_m16n8k16<Dtype>(rO.tile[m][n + 1], a[m], rV[2], rV[3]);
      }
    }
  }
}

// Scores times the sign of the caller's scale: only for scales that are not positive.
template <class Config>
__device__ __forceinline__ void apply_sign(Scores<Config>& rS, float sign) {
#pragma unroll
  for (int m = 0; m < rS.kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < rS.kMmaCols; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rS.tile[m][n][e] *= sign;
    }
  }
}

// -inf for keys that a row does not see. Columns are compared as constants with one limit per row.
template <class Config>
__device__ __forceinline__ void apply_mask(Scores<Config>& rS, const Mask& mask, int32_t first_row,
                                           int32_t first_key) {
  int const lane = ptx::thread_index() % 32;
#pragma unroll
  for (int m = 0; m < rS.kMmaRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = first_row + m * 16 + half * 8 + lane / 4;
      int const limit = mask.visible_end(row) - first_key - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < rS.kMmaCols; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e >= limit) rS.tile[m][n][half * 2 + e] = -infinity();
        }
      }
    }
  }
}

// Turns scores into probabilities against the maximum so far and brings rO to the same footing:
// which, after the first blocks, it mostly is, so that the products with 1 are skipped.
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

// Completes the warp's rows and writes them and their LSE, by way of the warp's rows of the tile
// sO: so the stores to global memory are whole 16-byte chunks.
template <class Config, bool kAligned>
__device__ __forceinline__ void store_output(const AttentionFwdProblem& problem,
                                             Softmax<Config>& softmax, const Output<Config>& rO,
                                             unsigned char* sO) {
  using LayoutO = typename Config::SmemLayoutQ;
  int const lane = threadIdx.x % 32;
  int const warp_row = threadIdx.x / 32 * Config::kWarpRows;
  // Worked out again: kept from the start, it would cost the loop its registers.
  BlockPosition const position(problem, Config::kBlockQ);
  int32_t const rows = problem.queries.seqlen - position.first_query - warp_row;
  float* const gLSE = problem.lse + position.lse_row(problem) + warp_row;
  uint16_t* const gO =
      problem.out.data + position.offset(problem.out) + warp_row * problem.out.seq_stride;
#pragma unroll
  for (int m = 0; m < rO.kMmaRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_lse;
      float const inverse = softmax.finish(m * 2 + half, problem.scale_log2, row_lse);
      int const row = m * 16 + half * 8 + lane / 4;
      if (problem.lse != nullptr && lane % 4 == 0 && row < rows) gLSE[row] = row_lse;
#pragma unroll
      for (int n = 0; n < rO.kMmaCols; ++n) {
        uint32_t const offset = LayoutO::chunk_offset(warp_row + row, n % LayoutO::kPageChunks) +
                                n / LayoutO::kPageChunks * LayoutO::kPageBytes + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(sO + offset) = Config::Dtype::pack(
            rO.tile[m][n][half * 2] * inverse, rO.tile[m][n][half * 2 + 1] * inverse);
      }
    }
  }
  __syncwarp();  // all lanes have written their part of the warp's rows
  store_rows<LayoutO, Config::kWarpRows, kAligned>(gO, problem.out.seq_stride, sO, warp_row, rows,
                                                   problem.head_dim);
}

template <class Config, bool kAligned>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSM)
    attention_fwd_kernel(const __grid_constant__ AttentionFwdProblem problem) {
  using LayoutQ = typename Config::SmemLayoutQ;
  using LayoutKV = typename Config::SmemLayoutKV;
  constexpr int kThreads = Config::kThreads;
  constexpr int kBlockKV = Config::kBlockKV;

  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* const sQ = smem;  // later sO: a warp reads and writes its own rows only
  unsigned char* const sK = sQ + LayoutQ::kBytes;
  unsigned char* const sV = sK + LayoutKV::kBytes;

  BlockPosition const position(problem, Config::kBlockQ);
  int32_t const first_query = position.first_query;
  int32_t const queries = min(problem.queries.seqlen - first_query, Config::kBlockQ);
  uint32_t const head_kv = position.head / problem.group;
  const uint16_t* const gK =
      problem.k.data + position.batch * problem.k.batch_stride + head_kv * problem.k.head_stride;
  const uint16_t* const gV =
      problem.v.data + position.batch * problem.v.batch_stride + head_kv * problem.v.head_stride;

  auto load_kv = [&](unsigned char* tile, const uint16_t* gmem, int64_t stride, int32_t n) {
    int32_t const first_key = n * kBlockKV;
    load_tile<LayoutKV, kThreads, kAligned>(tile, gmem + first_key * stride, stride,
                                            problem.keys.seqlen - first_key, problem.head_dim);
    ptx::cp_async_commit();
  };

  Mask const mask{problem.queries.seqlen, problem.keys.seqlen, problem.window_left,
                  problem.window_right};
  int32_t const visible = mask.visible_end(first_query + queries - 1);
  int32_t const blocks_kv = (visible + kBlockKV - 1) / kBlockKV;

  int const warp_row = ptx::thread_index() / 32 * Config::kWarpRows;

  Output<Config> rO;
  rO.clear();
  Softmax<Config> softmax;

  if (blocks_kv > 0) {
    const uint16_t* const gQ = problem.q.data + position.offset(problem.q);
    load_tile<LayoutQ, kThreads, kAligned>(sQ, gQ, problem.q.seq_stride, queries, problem.head_dim);
    load_kv(sK, gK, problem.k.seq_stride, blocks_kv - 1);
  }
  for (int32_t n = blocks_kv - 1; n >= 0; --n) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // K(n), and at first Q, is there for all; all are done with V(n + 1)
    load_kv(sV, gV, problem.v.seq_stride, n);

    Scores<Config> rS;
    multiply_qk<Config>(rS, sQ + warp_row * LayoutQ::kRowBytes, sK);

    ptx::cp_async_wait<0>();
    __syncthreads();  // V(n) is there for all; all are done with K(n)
    if (n > 0) load_kv(sK, gK, problem.k.seq_stride, n - 1);

    if (problem.score_sign != 1.f) apply_sign<Config>(rS, problem.score_sign);
    if (mask.hides_any(first_query, first_query + queries - 1, n * kBlockKV, (n + 1) * kBlockKV)) {
      apply_mask<Config>(rS, mask, first_query + warp_row, n * kBlockKV);
    }
    softmax_step<Config>(softmax, rS, rO, problem.scale_log2);
    multiply_pv<Config>(rO, rS, sV);
  }

  __syncwarp();  // all lanes have read the warp's rows of Q, which O now takes
  store_output<Config, kAligned>(problem, softmax, rO, sQ);
}

}  // namespace flashvar::sm80
