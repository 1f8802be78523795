// ScoreFeatures in the backward's scores, whose rows are keys: softcap, ALiBi and dropout. A bias
// is left to the mma.sync family: its gradient is an access to memory for every score, which takes
// longer than the products.
#pragma once
#include <cstdint>

#include "core/dropout.cuh"
#include "core/score_modification.cuh"
#include "ptx/special_registers.cuh"
#include "sm90/attention_bwd_consumer.cuh"

namespace flashvar::sm90 {

// The thread's first score: accumulator i of mma tile n is 8 n + i % 2 queries and i / 2 * 8 keys
// on.
struct FeaturePlace {
  int32_t key, query, column;

  __device__ __forceinline__ FeaturePlace(int32_t first_key, int32_t first_query) {
    uint32_t const thread = ptx::thread_index();
    column = thread % 4 * 2;
    key = first_key + thread / 32 % 4 * 16 + thread % 32 / 4;
    query = first_query + column;
  }

  __device__ __forceinline__ float bias(const Alibi& alibi, int n, int i) const {
    return alibi(alibi.distance(query, key) + static_cast<float>(8 * n + i % 2 - i / 2 * 8));
  }
  // LSE or D of the queries of mma tile n.
  __device__ __forceinline__ float2 of_queries(uint32_t smem, int n) const {
    return ptx::shared_load2(smem + (8 * n + column) * 4);
  }
};

// Turns scores into weights before dropout; those that it drops become negative.
template <class Config, class Tile>
__device__ __forceinline__ void weigh_features(typename Scores<Config>::Registers& scores,
                                               const AttentionBwdProblem& problem, const Tile& tile,
                                               uint32_t head, uint32_t lse, int32_t first_key,
                                               int32_t first_query) {
  const ScoreFeatures& features = problem.features;
  const Mask& mask = tile.mask;
  FeaturePlace const place(first_key, first_query);
#pragma unroll
  for (int kk = 0; kk < Scores<Config>::kSteps; ++kk) {  // two mma tiles, a patch of dropout
    float* const score = &scores[8 * kk];
    float scale = features.scale;  // what the scores are yet to be multiplied by
    if (features.softcap != 0.f) {
      Softcap const softcap(features.softcap, scale);
#pragma unroll
      for (int i = 0; i < 8; ++i) score[i] = softcap(score[i]);
      scale = 1.f;
    }
    if (features.alibi_slopes != nullptr) {
      Alibi const alibi(problem, tile.batch, head, mask.seqlen_q, mask.seqlen_k);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        score[i] = score[i] * scale + place.bias(alibi, 2 * kk + i / 4, i % 4);
      }
      scale = 1.f;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float2 const shift = place.of_queries(lse, 2 * kk + j);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        score[i] = exp2_approx(score[i] * (scale / kLn2) - (i % 2 == 0 ? shift.x : shift.y));
      }
    }
  }
  hide_weights<Config>(scores, mask, first_key, first_query);
  if (features.rng == nullptr) return;
  DropoutWords const words(features.rng, tile.batch * problem.heads_q + head);
#pragma unroll
  for (int kk = 0; kk < Scores<Config>::kSteps; ++kk) {
    DropoutBits const bits = words.along_rows(place.query + 16 * kk, place.key);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& weight = scores[8 * kk + i];
      if (!bits.keeps(i / 4, i % 2, i / 2 % 2, features.dropout_threshold)) weight = -weight;
    }
  }
}

// Weights after dropout as operand a, but for the factor of those that are kept: dV gets it.
template <class Config>
__device__ __forceinline__ void pack_features(const typename Scores<Config>::Registers& scores,
                                              typename Scores<Config>::Packed& packed) {
#pragma unroll
  for (int kk = 0; kk < Scores<Config>::kSteps; ++kk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = &scores[8 * kk + 2 * i];
      packed[kk][i] = Config::Dtype::pack_positive(pair[0], pair[1]);
    }
  }
}

// What dV is multiplied by.
template <class Config>
__device__ __forceinline__ float grad_v_scale(const AttentionBwdProblem& problem) {
  return Config::kFeatures ? problem.features.dropout_scale : 1.f;
}

// What a derivative of softcap is taken for 0 below: log2 P + LSE is rounded, by some 2^-22 of the
// LSE, which is that of the scores with ALiBi.
inline constexpr float kSaturated = 1e-5f;

// dS of mma tile n, where dP was. The capped score, which softcap's derivative is made of, is that
// which the weight came of: to keep it too there are no registers.
template <class Config, class Tile>
__device__ __forceinline__ void differentiate_features(const float* weights, float* grads,
                                                       const AttentionBwdProblem& problem,
                                                       const Tile& tile, uint32_t head,
                                                       uint32_t lse, uint32_t row_sums, int n,
                                                       int32_t first_key, int32_t first_query) {
  const ScoreFeatures& features = problem.features;
  FeaturePlace const place(first_key, first_query);
  float2 const sums = place.of_queries(row_sums, n);
  if (features.rng == nullptr) {
    differentiate<Config>(weights, grads, sums);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bool const kept = __float_as_int(weights[i]) >= 0;
      float const grad = kept ? grads[i] * features.dropout_scale : 0.f;
      grads[i] = fabsf(weights[i]) * (grad - (i % 2 == 0 ? sums.x : sums.y));
    }
  }
  if (features.softcap == 0.f) return;
  Softcap const softcap(features.softcap);
  float2 const shift = place.of_queries(lse, n);
  float capped[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    capped[i] = (__log2f(fabsf(weights[i])) + (i % 2 == 0 ? shift.x : shift.y)) * kLn2;
  }
  if (features.alibi_slopes != nullptr) {
    Alibi const alibi(problem, tile.batch, head, tile.mask.seqlen_q, tile.mask.seqlen_k);
#pragma unroll
    for (int i = 0; i < 4; ++i) capped[i] -= place.bias(alibi, n, i);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Saturated scores have no gradient, and of no weight nothing is known; NaN stays NaN.
    float const derivative = softcap.derivative(capped[i]);
    grads[i] = weights[i] == 0.f || derivative <= kSaturated ? 0.f : grads[i] * derivative;
  }
}

}  // namespace flashvar::sm90
