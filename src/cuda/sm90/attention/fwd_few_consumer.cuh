// A warp of the forward for few rows (fwd_few.cuh): scores, softmax and output of its keys.
#pragma once
#include <cstdint>

#include "attention/online_softmax.cuh"
#include "core/math.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/movmatrix.cuh"
#include "ptx/special_registers.cuh"
#include "sm90/attention/fwd_few_config.cuh"
#include "sm90/attention/query_tile.cuh"

namespace flashvar::sm90::attention {

// Accumulators are m16n8: a thread has rows lane / 4 and lane / 4 + 8 (of S: keys; of O: columns
// of V), and columns 2 (lane % 4) and the next: queries.
template <class Config>
struct FewConsumer {
  using Dtype = typename Config::Dtype;
  static constexpr int kKeys = Config::kBlockKV / Config::kKeyWarps;  // of a block, of a warp
  static constexpr int kTiles = kKeys / 16;
  static constexpr int kSteps = Config::kHeadDim / 16, kTilesV = Config::kHeadDimV / 16;
  static constexpr int kRows = Config::kWarpRows, kN = kRows / 8;
  int32_t first_row, first_key;             // the warp's: a row of the tile, a key of a block
  uint32_t rQ[kN][kSteps + kSteps % 2][2];  // operand B of S; ldmatrix loads two steps at a time
  float rS[kN][kTiles][4];
  float rO[kN][kTilesV][4];
  // Of the thread's queries. The maximum is that of unscaled scores; -inf: no key seen yet.
  float running_max[kN][2], row_sum[kN][2];

  __device__ __forceinline__ explicit FewConsumer(int warp)
      : first_row(kRows == Config::kBlockQ ? 0 : warp / Config::kKeyWarps * kRows),
        first_key((kRows == Config::kBlockQ ? warp : warp % Config::kKeyWarps) * kKeys) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4 * kTilesV; ++i) rO[n][i / 4][i % 4] = 0.f;
#pragma unroll
      for (int e = 0; e < 2; ++e) running_max[n][e] = -infinity(), row_sum[n][e] = 0.f;
    }
  }

  __device__ __forceinline__ void load_q(uint32_t sQ) {
    int const lane = ptx::thread_index() % 32;
    uint32_t const rows = sQ + (first_row + lane % 8) * 128;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        uint32_t r[4];
        uint32_t const unit = (k % 4 * 2 + lane / 8) ^ (lane % 8);
        ptx::ldmatrix_x4(r, rows + k / 4 * Config::kColBlockBytesQ + n * 8 * 128 + unit * 16);
        rQ[n][k][0] = r[0], rQ[n][k][1] = r[1], rQ[n][k + 1][0] = r[2], rQ[n][k + 1][1] = r[3];
      }
    }
  }

  // rS = K Q^T for the warp's keys.
  __device__ __forceinline__ void multiply_k(uint32_t sK) {
    int const lane = ptx::thread_index() % 32;
    uint32_t const rows = sK + (first_key + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < kScores; ++i) score(i) = 0.f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t const unit = (k % 4 * 2 + lane / 16) ^ (lane % 8);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, rows + k / 4 * Config::kColBlockBytesKV + t * 16 * 128 + unit * 16);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          ptx::mma_m16n8k16<Dtype>(rS[n][t], a, rQ[n][k][0], rQ[n][k][1]);
        }
      }
    }
  }

  // Masks scores, and raises the running maxima where scores exceed them by much. key: the first of
  // the warp's keys, within the sequence.
  __device__ __forceinline__ void update_maxima(const FwdProblem& problem,
                                                const QueryTile<Config>& tile, int32_t key) {
    float const sign = problem.score_sign, scale = problem.scale_log2;
    if (sign != 1.f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) score(i) *= sign;
    }
    int32_t const first = tile.query(first_row), last = tile.query(first_row + kRows - 1);
    if (tile.mask.hides_any(first, last, key, key + kKeys)) hide(tile, key);
    float highest[2 * kN];
    bool raises = false;
#pragma unroll
    for (int j = 0; j < 2 * kN; ++j) {
      highest[j] = -infinity();
#pragma unroll
      for (int i = j % 2; i < 4 * kTiles; i += 2) {
        highest[j] = fmaxf(highest[j], score(j / 2 * 4 * kTiles + i));
      }
      raises = raises || (highest[j] - running_max[j / 2][j % 2]) * scale > kRescaleThreshold;
    }
    if (__any_sync(0xffffffffu, raises)) raise_maxima(highest, scale);
  }

  // Computes P in rS.
  __device__ __forceinline__ void exponentiate(float scale) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      float const top = running_max[i / (4 * kTiles)][i % 2];
      score(i) = exp2_approx((score(i) - (top == -infinity() ? 0.f : top)) * scale);
      row_sum[i / (4 * kTiles)][i % 2] += score(i);
    }
  }

  // rO += V^T P^T for the warp's keys. With kTail `existing` of them are in use; the others' values
  // may be NaN.
  template <bool kTail>
  __device__ __forceinline__ void multiply_v(uint32_t sV, int32_t existing) {
    int const lane = ptx::thread_index() % 32;
    uint32_t const rows = sV + (first_key + lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint32_t b[kN][2];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        b[n][0] = ptx::movmatrix_trans(Dtype::pack(rS[n][t][0], rS[n][t][1]));
        b[n][1] = ptx::movmatrix_trans(Dtype::pack(rS[n][t][2], rS[n][t][3]));
      }
#pragma unroll
      for (int d = 0; d < kTilesV; ++d) {
        uint32_t a[4];
        uint32_t const unit = (d % 4 * 2 + lane / 8 % 2) ^ (lane % 8);
        ptx::ldmatrix_x4_trans(a,
                               rows + d / 4 * Config::kColBlockBytesKV + t * 16 * 128 + unit * 16);
        if constexpr (kTail) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int32_t const key = t * 16 + i / 2 * 8 + lane % 4 * 2;
            a[i] &= (key < existing ? 0xffffu : 0u) | (key + 1 < existing ? 0xffff0000u : 0u);
          }
        }
#pragma unroll
        for (int n = 0; n < kN; ++n) ptx::mma_m16n8k16<Dtype>(rO[n][d], a, b[n][0], b[n][1]);
      }
    }
  }

 private:
  static constexpr int kScores = 4 * kN * kTiles;
  __device__ __forceinline__ float& score(int i) {
    return rS[i / (4 * kTiles)][i / 4 % kTiles][i % 4];
  }

  __device__ __forceinline__ void hide(const QueryTile<Config>& tile, int32_t first) {
    int const lane = ptx::thread_index() % 32;
#pragma unroll
    for (int j = 0; j < 2 * kN; ++j) {
      int32_t const query = tile.query(first_row + j / 2 * 8 + lane % 4 * 2 + j % 2);
      int32_t const begin = tile.mask.key_begin(query), end = tile.mask.key_end(query);
#pragma unroll
      for (int i = j % 2; i < 4 * kTiles; i += 2) {
        int32_t const key = first + i / 4 * 16 + i / 2 % 2 * 8 + lane / 4;
        if (key < begin || key >= end) score(j / 2 * 4 * kTiles + i) = -infinity();
      }
    }
  }

  // Raises the running maxima to those of the block, and rescales sums and outputs.
  __device__ __forceinline__ void raise_maxima(const float (&highest)[2 * kN], float scale) {
#pragma unroll
    for (int j = 0; j < 2 * kN; ++j) {
      float top = highest[j];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
      }
      float& maximum = running_max[j / 2][j % 2];
      float const before = maximum;
      maximum = fmaxf(before, top);
      float const factor = maximum == before ? 1.f : exp2_approx((before - maximum) * scale);
      row_sum[j / 2][j % 2] *= factor;
#pragma unroll
      for (int d = 0; d < kTilesV; ++d) {
        rO[j / 2][d][j % 2] *= factor;
        rO[j / 2][d][2 + j % 2] *= factor;
      }
    }
  }
};

}  // namespace flashvar::sm90::attention
