// ScoreFeatures in the backward's scores: softcap, ALiBi and dropout. A bias is left to the
// mma.sync family: its gradient is an access to memory for every score, which takes longer than the
// products.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/dropout.cuh"
#include "core/score_modification.cuh"
#include "ptx/special_registers.cuh"
#include "sm90/attention_bwd_consumer.cuh"

namespace flashvar::sm90 {

// What a loop is made for. Most calls have one feature: their loops ask nothing, and the code of
// others is not in their way.
enum class Feature { kSoftcap, kAlibi, kDropout, kSeveral };

// Calls `evaluate` with the Feature of the call, as a constant.
template <class Evaluate>
__device__ __forceinline__ void with_feature(const ScoreFeatures& features, Evaluate&& evaluate) {
  bool const softcap = features.softcap != 0.f, alibi = features.alibi_slopes != nullptr;
  bool const dropout = features.rng != nullptr;
  if (alibi && !softcap && !dropout) {
    evaluate(std::integral_constant<Feature, Feature::kAlibi>{});
  } else if (softcap && !alibi && !dropout) {
    evaluate(std::integral_constant<Feature, Feature::kSoftcap>{});
  } else if (dropout && !alibi && !softcap) {
    evaluate(std::integral_constant<Feature, Feature::kDropout>{});
  } else {
    evaluate(std::integral_constant<Feature, Feature::kSeveral>{});
  }
}

// dS of an mma tile, where dP was, of a call with dropout. `factors`: negative where it drops.
template <class Values>
__device__ __forceinline__ void differentiate_dropped(const float* factors, float* grads,
                                                      float scale, float2 sums) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float const grad = __float_as_int(factors[i]) >= 0 ? grads[i] * scale : 0.f;
    grads[i] = fabsf(factors[i]) * (grad - (i / Values::kEvery % 2 == 0 ? sums.x : sums.y));
  }
}

// The features of one step, for a thread whose first score is that of `key` and `query`. A patch is
// two mma tiles, 2 kk and 2 kk + 1: accumulator i of tile n is 8 n + i % 2 columns and i / 2 * 8
// rows on.
template <class Config, Feature kFeature, class Values>
struct FeatureStep {
  static constexpr bool kRowsAreKeys = Values::kEvery == 1;
  const ScoreFeatures& features;
  float scale_log2;
  int32_t key, query;
  float slope_log2;  // of ALiBi, negative, with the distance of the first score
  float distance;
  DropoutWords words;
  // Zeros, made of a patch's packed weights, which have no sign, as cvt's relu makes 0 of -0 too:
  // Philox of the patch after the next waits for them. The compiler would start all patches at
  // once, with registers for half of that.
  uint32_t chain[2] = {0, 0};

  template <class Tile>
  __device__ __forceinline__ FeatureStep(const AttentionBwdProblem& problem, const Tile& tile,
                                         uint32_t head, int32_t first_key, int32_t first_query)
      : features(problem.features), scale_log2(problem.features.scale * (1.f / kLn2)) {
    uint32_t const thread = ptx::thread_index();
    int32_t const row = thread / 32 % 4 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    key = first_key + (kRowsAreKeys ? row : column);
    query = first_query + (kRowsAreKeys ? column : row);
    if (has(Feature::kAlibi)) {
      Alibi const alibi(problem, tile.batch, head, tile.mask.seqlen_q, tile.mask.seqlen_k);
      slope_log2 = -alibi.slope * (1.f / kLn2);
      distance = alibi.distance(query, key);
    }
    if (has(Feature::kDropout)) {
      words = DropoutWords(features.rng, tile.batch * problem.heads_q + head);
    }
  }

  __device__ __forceinline__ bool has(Feature which) const {
    if constexpr (kFeature != Feature::kSeveral) return kFeature == which;
    return which == Feature::kSoftcap ? features.softcap != 0.f
           : which == Feature::kAlibi ? features.alibi_slopes != nullptr
                                      : features.rng != nullptr;
  }

  // Packs the weights of a patch as operand a, but for the factor of those that dropout keeps,
  // which dV gets. Leaves, where the scores were, what dP - D is multiplied by: the weights times
  // softcap's derivative. Of weights that are dropped it is negative.
  __device__ __forceinline__ void weigh(int kk, const Values& lse, float* scores,
                                        uint32_t (&packed)[4]) {
    float exponent[8];  // but for the score's part
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float2 const shift = lse.of_tile(2 * kk + j);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        exponent[i] = i / Values::kEvery % 2 == 0 ? -shift.x : -shift.y;
      }
    }
    if (has(Feature::kAlibi)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float const on = 16 * kk + i / 4 * 8 + i % 2 - i / 2 % 2 * 8;
        exponent[i] =
            fmaf(slope_log2, fabsf(kRowsAreKeys ? distance + on : distance - on), exponent[i]);
      }
    }
    float weights[8];
    if (has(Feature::kSoftcap)) {
      Softcap const softcap(features, features.scale);
      float const cap_log2 = features.softcap * (1.f / kLn2);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float const inverse = softcap.inverse(scores[i]);
        weights[i] = exp2_approx(fmaf(-2.f * cap_log2, inverse, exponent[i] + cap_log2));
        scores[i] = Softcap::derivative_of_inverse(inverse);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        weights[i] = exp2_approx(fmaf(scores[i], scale_log2, exponent[i]));
        scores[i] = 1.f;
      }
    }
    if (has(Feature::kDropout)) {
      int32_t const on = 16 * kk + chain[kk % 2];
      DropoutBits const bits =
          kRowsAreKeys ? words.along_rows(query + on, key) : words.along_columns(query, key + on);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int const row_half = i / 2 % 2, column_half = i / 4;
        bool const kept =
            kRowsAreKeys ? bits.keeps(column_half, i % 2, row_half, features.dropout_threshold)
                         : bits.keeps(row_half, i % 2, column_half, features.dropout_threshold);
        if (!kept) weights[i] = -weights[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[i] = Config::Dtype::pack_positive(weights[2 * i], weights[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) scores[i] *= weights[i];
    chain[kk % 2] = packed[3] >> 31;
  }

  // dS of a patch, where dP was; `factors`: what weigh() left.
  __device__ __forceinline__ void differentiate(int kk, const Values& row_sums,
                                                const float* factors, float* grads) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float2 const sums = row_sums.of_tile(2 * kk + j);
      if (has(Feature::kDropout)) {
        differentiate_dropped<Values>(&factors[4 * j], &grads[4 * j], features.dropout_scale, sums);
      } else {
        sm90::differentiate<Values>(&factors[4 * j], &grads[4 * j], sums);
      }
    }
  }
};

// S and dP to P and dS, packed, with S and dP in registers: what comes of a score is used where it
// is known, and none of it is kept or computed again.
template <class Config, class Values, class Tile>
__device__ __forceinline__ void evaluate_features(
    typename Scores<Config>::Registers& scores, typename Scores<Config>::Registers& grads,
    typename Scores<Config>::Packed& packed_weights, typename Scores<Config>::Packed& packed_grads,
    const AttentionBwdProblem& problem, const Tile& tile, uint32_t head, const Values& lse,
    const Values& row_sums, int32_t first_key, int32_t first_query) {
  with_feature(problem.features, [&](auto feature) {
    FeatureStep<Config, feature.value, Values> step(problem, tile, head, first_key, first_query);
#pragma unroll
    for (int kk = 0; kk < Scores<Config>::kSteps; ++kk) {
      step.weigh(kk, lse, &scores[8 * kk], packed_weights[kk]);
      step.differentiate(kk, row_sums, &scores[8 * kk], &grads[8 * kk]);
      Scores<Config>::pack(&grads[8 * kk], packed_grads[kk]);
    }
  });
}

// S to P, packed, and what dP - D is multiplied by.
template <class Config, class Values, class Tile>
__device__ __forceinline__ void weigh_features(typename Scores<Config>::Registers& scores,
                                               typename Scores<Config>::Packed& packed,
                                               const AttentionBwdProblem& problem, const Tile& tile,
                                               uint32_t head, const Values& lse, int32_t first_key,
                                               int32_t first_query) {
  with_feature(problem.features, [&](auto feature) {
    FeatureStep<Config, feature.value, Values> step(problem, tile, head, first_key, first_query);
#pragma unroll
    for (int kk = 0; kk < Scores<Config>::kSteps; ++kk) {
      step.weigh(kk, lse, &scores[8 * kk], packed[kk]);
    }
  });
}

// What dV is multiplied by.
template <class Config>
__device__ __forceinline__ float grad_v_scale(const AttentionBwdProblem& problem) {
  return Config::kFeatures ? problem.features.dropout_scale : 1.f;
}

}  // namespace flashvar::sm90
