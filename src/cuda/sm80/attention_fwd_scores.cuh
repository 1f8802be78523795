// A block of scores as a warp holds it, and what happens to it element by element between the two
// products.
#pragma once
#include <cstdint>

#include "core/dropout.cuh"
#include "core/dtype.cuh"
#include "core/online_softmax.cuh"
#include "core/problem.h"
#include "core/score_modification.cuh"
#include "ptx/special_registers.cuh"
#include "sm80/attention_fwd_block.cuh"

namespace flashvar::sm80 {

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
using Output = Accumulator<Config, Config::kHeadDimV>;
// Calls visit(score, m, n, e) for each of a lane's scores: row m * 16 + e / 2 * 8 and column
// n * 8 + e % 2 from its first ones.
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

// Row and column of a lane's first score in the matrix of scores of one head, of which the block's
// rows and keys from `first_key` on are computed.
struct ScoreOrigin {
  int32_t row, column;

  __device__ __forceinline__ ScoreOrigin(const Block& block, int32_t warp_row, int32_t first_key) {
    int const lane = ptx::thread_index() % 32;
    row = block.first_query + warp_row + lane / 4;
    column = first_key + lane % 4 * 2;
  }
};

template <class Config, class Element>
__device__ __forceinline__ void add_bias(Scores<Config>& rS, const AttentionProblem& problem,
                                         const Block& block, const ScoreOrigin& origin) {
  Bias<Element> const bias(problem, block.batch, block.head);
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

// Fetches from afar what add_bias will want of a block of keys: a row per thread.
template <class Config>
__device__ __forceinline__ void prefetch_bias(const AttentionProblem& problem, const Block& block,
                                              int32_t first_key) {
  static_assert(Config::kThreads >= Config::kBlockQ);
  if (problem.features.bias.data == nullptr || ptx::thread_index() >= Config::kBlockQ) return;
  int32_t const row = block.first_query + ptx::thread_index();
  if (problem.features.bias_is_fp32) {
    Bias<dtype::fp32> const bias(problem, block.batch, block.head);
    bias.prefetch(row, first_key, Config::kBlockKV);
  } else {
    Bias<typename Config::Dtype> const bias(problem, block.batch, block.head);
    bias.prefetch(row, first_key, Config::kBlockKV);
  }
}

// Turns q . k into final scores in natural-log units, but for the mask.
template <class Config>
__device__ __forceinline__ void modify_scores(Scores<Config>& rS, const AttentionProblem& problem,
                                              const Block& block, int32_t warp_row,
                                              int32_t first_key) {
  const ScoreFeatures& features = problem.features;
  for_each_score<Config>(rS, [&](float& s, int, int, int) { s *= features.scale; });
  if (features.softcap != 0.f) {
    Softcap const softcap(features.softcap);
    for_each_score<Config>(rS, [&](float& s, int, int, int) { s = softcap(s); });
  }
  if (features.alibi_slopes != nullptr) {
    ScoreOrigin const origin(block, warp_row, first_key);
    Alibi const alibi(problem, block.batch, block.head, block.queries.count, block.keys.count);
    float const distance = alibi.distance(origin.row, origin.column);
    for_each_score<Config>(rS, [&](float& s, int m, int n, int e) {
      s += alibi(distance + static_cast<float>(m * 16 + e / 2 * 8 - n * 8 - e % 2));
    });
  }
  if (features.bias.data != nullptr) {
    ScoreOrigin const origin(block, warp_row, first_key);
    if (features.bias_is_fp32) {
      add_bias<Config, dtype::fp32>(rS, problem, block, origin);
    } else {
      add_bias<Config, typename Config::Dtype>(rS, problem, block, origin);
    }
  }
}

// Drops weights. Those that are kept grow at the end, with the output.
template <class Config>
__device__ __forceinline__ void drop_weights(Scores<Config>& rP, const AttentionProblem& problem,
                                             const Block& block, int32_t warp_row,
                                             int32_t first_key) {
  const ScoreFeatures& features = problem.features;
  if (features.rng == nullptr) return;
  ScoreOrigin const origin(block, warp_row, first_key);
  DropoutWords const words(features.rng, block.batch * problem.heads_q + block.head);
#pragma unroll
  for (int m = 0; m < rP.kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < rP.kMmaCols; n += 2) {
      DropoutBits const bits = words.along_columns(origin.row + m * 16, origin.column + n * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int const row_half = i / 2 % 2, column_half = i / 4;
        bool const kept = bits.keeps(row_half, i % 2, column_half, features.dropout_threshold);
        if (!kept) rP.tile[m][n + column_half][i % 4] = 0.f;
      }
    }
  }
}

// Scores times the sign of the caller's scale: only for scales that are not positive.
template <class Config>
__device__ __forceinline__ void apply_sign(Scores<Config>& rS, float sign) {
  for_each_score<Config>(rS, [&](float& s, int, int, int) { s *= sign; });
}

// -inf for keys that a row does not see. Columns are compared as constants with limits per row.
template <class Config>
__device__ __forceinline__ void apply_mask(Scores<Config>& rS, const AttentionProblem& problem,
                                           const Block& block, int32_t warp_row,
                                           int32_t first_key) {
  Mask const mask = block.mask(problem);
  ScoreOrigin const origin(block, warp_row, first_key);
#pragma unroll
  for (int m = 0; m < rS.kMmaRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t const row = origin.row + m * 16 + half * 8;
      int32_t const end = mask.visible_end(row) - origin.column;
#pragma unroll
      for (int n = 0; n < rS.kMmaCols; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e >= end) rS.tile[m][n][half * 2 + e] = -infinity();
        }
      }
      if (mask.left == kUnbounded) continue;
      int32_t const begin = mask.visible_begin(row) - origin.column;
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

}  // namespace flashvar::sm80
