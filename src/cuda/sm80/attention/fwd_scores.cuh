// Score modifiers, mask and dropout, applied to a warp's scores of one key block.
#pragma once
#include <cstdint>

#include "attention/dropout.cuh"
#include "attention/online_softmax.cuh"
#include "attention/problem.h"
#include "attention/score_modifiers.cuh"
#include "core/dtype.cuh"
#include "ptx/special_registers.cuh"
#include "sm80/attention/query_tile.cuh"
#include "sm80/gemm.cuh"

namespace flashvar::sm80::attention {

template <class Config>
using Scores = Accumulator<Config::kWarpRows, Config::kBlockKV>;
template <class Config>
using Output = Accumulator<Config::kWarpRows, Config::kHeadDimV>;

// Calls visit(score, m, n, e) for each of a lane's scores. Relative to the lane's first score it is
// at row m * 16 + e / 2 * 8, column n * 8 + e % 2.
template <class Config, class Visit>
__device__ __forceinline__ void for_each_score(Scores<Config>& rS, Visit&& visit) {
#pragma unroll
  for (int m = 0; m < rS.kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < rS.kMmaCols; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(rS.tile[m][n][e], m, n, e);
    }
  }
}

// Query (row) and key (column) of a lane's first score within their sequences. `warp_row`: the
// warp's first row in the tile; `first_key`: of the key block.
struct ScoreOrigin {
  int32_t row, column;

  __device__ __forceinline__ ScoreOrigin(const QueryTile& tile, int32_t warp_row,
                                         int32_t first_key) {
    int const lane = ptx::thread_index() % 32;
    row = tile.first_query + warp_row + lane / 4;
    column = first_key + lane % 4 * 2;
  }
};

// Adds the bias of the key block to the scores, two elements at a time where alignment allows.
template <class Config, class Element>
__device__ __forceinline__ void add_bias(Scores<Config>& rS, const Problem& problem,
                                         const QueryTile& tile, const ScoreOrigin& origin) {
  Bias<Element> const bias(problem, tile.batch, tile.head);
  if (bias.has_pairs()) {
#pragma unroll
    for (int m = 0; m < rS.kMmaRows; ++m) {
#pragma unroll
      for (int n = 0; n < rS.kMmaCols; ++n) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          float2 const pair = bias.pair(origin.row + m * 16 + e / 2 * 8, origin.column + n * 8);
          rS.tile[m][n][e] += pair.x;
          rS.tile[m][n][e + 1] += pair.y;
        }
      }
    }
  } else {
    for_each_score<Config>(rS, [&](float& s, int m, int n, int e) {
      s += bias(origin.row + m * 16 + e / 2 * 8, origin.column + n * 8 + e % 2);
    });
  }
}

// Prefetches the bias of a key block into L2, one row per thread.
template <class Config>
__device__ __forceinline__ void prefetch_bias(const Problem& problem, const QueryTile& tile,
                                              int32_t first_key) {
  static_assert(Config::kThreads >= Config::kBlockQ);
  if (problem.modifiers.bias.data == nullptr || ptx::thread_index() >= Config::kBlockQ) return;
  int32_t const row = tile.first_query + ptx::thread_index();
  if (problem.modifiers.bias_is_fp32) {
    Bias<dtype::fp32> const bias(problem, tile.batch, tile.head);
    bias.prefetch(row, first_key, Config::kBlockKV);
  } else {
    Bias<typename Config::Dtype> const bias(problem, tile.batch, tile.head);
    bias.prefetch(row, first_key, Config::kBlockKV);
  }
}

// Applies scale, softcap, ALiBi and bias: from q . k to scores in natural-log units, before the
// mask.
template <class Config>
__device__ __forceinline__ void modify_scores(Scores<Config>& rS, const Problem& problem,
                                              const QueryTile& tile, int32_t warp_row,
                                              int32_t first_key) {
  const ScoreModifiers& modifiers = problem.modifiers;
  for_each_score<Config>(rS, [&](float& s, int, int, int) { s *= modifiers.scale; });
  if (modifiers.softcap != 0.f) {
    Softcap const softcap(modifiers.softcap);
    for_each_score<Config>(rS, [&](float& s, int, int, int) { s = softcap(s); });
  }
  if (modifiers.alibi_slopes != nullptr) {
    ScoreOrigin const origin(tile, warp_row, first_key);
    Alibi const alibi(problem, tile.batch, tile.head, tile.queries.count, tile.keys.count);
    float const distance = alibi.distance(origin.row, origin.column);
    for_each_score<Config>(rS, [&](float& s, int m, int n, int e) {
      s += alibi(distance + static_cast<float>(m * 16 + e / 2 * 8 - n * 8 - e % 2));
    });
  }
  if (modifiers.bias.data != nullptr) {
    ScoreOrigin const origin(tile, warp_row, first_key);
    if (modifiers.bias_is_fp32) {
      add_bias<Config, dtype::fp32>(rS, problem, tile, origin);
    } else {
      add_bias<Config, typename Config::Dtype>(rS, problem, tile, origin);
    }
  }
}

// Zeros the dropped elements of P. store_output() multiplies the output by dropout_scale.
template <class Config>
__device__ __forceinline__ void apply_dropout(Scores<Config>& rP, const Problem& problem,
                                              const QueryTile& tile, int32_t warp_row,
                                              int32_t first_key) {
  const ScoreModifiers& modifiers = problem.modifiers;
  if (modifiers.rng == nullptr) return;
  ScoreOrigin const origin(tile, warp_row, first_key);
  DropoutRng const rng(modifiers.rng, tile.batch * problem.heads_q + tile.head);
#pragma unroll
  for (int m = 0; m < rP.kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < rP.kMmaCols; n += 2) {
      DropoutBits const bits = rng.draw(origin.row + m * 16, origin.column + n * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int const row_half = i / 2 % 2, column_half = i / 4;
        bool const kept = bits.keeps(row_half, i % 2, column_half, modifiers.dropout_threshold);
        if (!kept) rP.tile[m][n + column_half][i % 4] = 0.f;
      }
    }
  }
}

// Multiplies scores by the sign of the caller's scale. Called for scales <= 0 only.
template <class Config>
__device__ __forceinline__ void apply_sign(Scores<Config>& rS, float sign) {
  for_each_score<Config>(rS, [&](float& s, int, int, int) { s *= sign; });
}

// Sets scores of hidden keys to -inf. Limits are relative to the lane's first column, so that
// unrolled code compares them with constants.
template <class Config>
__device__ __forceinline__ void apply_mask(Scores<Config>& rS, const Problem& problem,
                                           const QueryTile& tile, int32_t warp_row,
                                           int32_t first_key) {
  Mask const mask = tile.mask<Config::kSplits>(problem);
  int32_t const shift = QueryTile::row_shift<Config::kSplits>(problem);
  ScoreOrigin const origin(tile, warp_row, first_key);
#pragma unroll
  for (int m = 0; m < rS.kMmaRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t const row = origin.row + m * 16 + half * 8;
      int32_t const end = mask.key_end(row >> shift) - origin.column;
#pragma unroll
      for (int n = 0; n < rS.kMmaCols; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e >= end) rS.tile[m][n][half * 2 + e] = -infinity();
        }
      }
      if (mask.left == kUnbounded) continue;
      int32_t const begin = mask.key_begin(row >> shift) - origin.column;
#pragma unroll
      for (int n = 0; n < rS.kMmaCols; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e < begin) rS.tile[m][n][half * 2 + e] = -infinity();
        }
      }
    }
  }
}

}  // namespace flashvar::sm80::attention
