// Score modifiers and dropout in the backward. Kernels with kBias evaluate all of them, those with
// kModifiers alone all but the bias.
#pragma once
#include <cstdint>
#include <type_traits>

#include "attention/dropout.cuh"
#include "attention/score_modifiers.cuh"
#include "ptx/special_registers.cuh"
#include "sm90/attention/bias_stage.cuh"
#include "sm90/attention/bwd_grad_bias.cuh"
#include "sm90/attention/bwd_scores.cuh"

namespace flashvar::sm90::attention {

// Specializations of the element-wise loop. Most calls have exactly one modifier; its loop then has
// no branches and no registers for the others. kBias, kBiasFp32: a bias of q's dtype or fp32, whose
// gradient is not wanted; kGradBias: a bias whose gradient is wanted.
enum class Modifier { kSoftcap, kAlibi, kDropout, kSeveral, kBias, kBiasFp32, kGradBias };

// Calls `evaluate` with the call's Modifier as a compile-time constant.
template <class Config, class Evaluate>
__device__ __forceinline__ void dispatch_modifier(const BwdProblem& problem, Evaluate&& evaluate) {
  const ScoreModifiers& modifiers = problem.modifiers;
  bool const softcap = modifiers.softcap != 0.f, alibi = modifiers.alibi_slopes != nullptr;
  bool const dropout = modifiers.rng != nullptr;
  if constexpr (Config::kBias) {
    if (softcap || alibi || dropout) {
      evaluate(std::integral_constant<Modifier, Modifier::kSeveral>{});
    } else if (Config::kGradBias && problem.grad_bias.data != nullptr) {
      evaluate(std::integral_constant<Modifier, Modifier::kGradBias>{});
    } else if (modifiers.bias_is_fp32) {
      evaluate(std::integral_constant<Modifier, Modifier::kBiasFp32>{});
    } else {
      evaluate(std::integral_constant<Modifier, Modifier::kBias>{});
    }
  } else if (alibi && !softcap && !dropout) {
    evaluate(std::integral_constant<Modifier, Modifier::kAlibi>{});
  } else if (softcap && !alibi && !dropout) {
    evaluate(std::integral_constant<Modifier, Modifier::kSoftcap>{});
  } else if (dropout && !alibi && !softcap) {
    evaluate(std::integral_constant<Modifier, Modifier::kDropout>{});
  } else {
    evaluate(std::integral_constant<Modifier, Modifier::kSeveral>{});
  }
}

// Computes dS in place of dP (`grads`), for one mma tile, with dropout. `factors`: from
// ModifierStep::exponentiate(), negative where the element is dropped. `scale`: dropout_scale.
template <class Values>
__device__ __forceinline__ void differentiate_dropped(const float* factors, float* grads,
                                                      float scale, float2 delta) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float const grad = __float_as_int(factors[i]) >= 0 ? grads[i] * scale : 0.f;
    grads[i] = fabsf(factors[i]) * (grad - (i / Values::kRepeat % 2 == 0 ? delta.x : delta.y));
  }
}

// Evaluates the modifiers of one main-loop step, for a thread whose first score is at (`key`,
// `query`). Fragment kk is the mma tiles 2 kk and 2 kk + 1; accumulator i of mma tile n lies 8 n +
// i % 2 columns and i / 2 * 8 rows from the first.
template <class Config, Modifier kModifier, class Values>
struct ModifierStep {
  static constexpr bool kRowsAreKeys = Values::kRepeat == 1;
  static constexpr bool kWantsGradBias =
      Config::kGradBias && (kModifier == Modifier::kSeveral || kModifier == Modifier::kGradBias);
  const ScoreModifiers& modifiers;
  float scale_log2;
  int32_t key, query;
  float slope_log2;  // ALiBi: -slope * log2(e)
  float distance;    // ALiBi: of the first score
  DropoutRng rng;
  // Always 0, which ptxas does not know: the sign bits of packed P, in which cvt.relu leaves no
  // negative number and no -0. They are added to the Philox counter two fragments later, as a false
  // dependency. Without it ptxas computes Philox of all fragments first, and spills registers.
  uint32_t chain[2] = {0, 0};
  // Used with Config::kBias only; derivative and grad_bias with Modifier::kGradBias only.
  uint32_t bias;  // address of the warp's BiasStage
  uint32_t lane;
  float derivative[8];  // of softcap, of the last fragment
  GradBias grad_bias;

  // `bias_`: address of the warp's BiasStage; read with Config::kBias only.
  template <class Tile>
  __device__ __forceinline__ ModifierStep(const BwdProblem& problem, const Tile& tile,
                                          uint32_t head, int32_t first_key, int32_t first_query,
                                          uint32_t bias_)
      : modifiers(problem.modifiers), scale_log2(problem.modifiers.scale * kLog2E), bias(bias_) {
    uint32_t const thread = ptx::thread_index();
    lane = thread % 32;
    int32_t const row = thread / 32 % 4 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    key = first_key + (kRowsAreKeys ? row : column);
    query = first_query + (kRowsAreKeys ? column : row);
    if (has(Modifier::kAlibi)) {
      Alibi const alibi(problem, tile.batch, head, tile.mask.seqlen_q, tile.mask.seqlen_k);
      slope_log2 = -alibi.slope * kLog2E;
      distance = alibi.distance(query, key);
    }
    if (has(Modifier::kDropout)) {
      rng = DropoutRng(modifiers.rng, tile.batch * problem.heads_q + head);
    }
    if constexpr (kWantsGradBias) {
      grad_bias = GradBias(problem, tile.mask, tile.batch, head, key, query);
    }
  }

  // Whether the call has the modifier: a constant, or for kSeveral a branch.
  __device__ __forceinline__ bool has(Modifier which) const {
    if constexpr (kModifier != Modifier::kSeveral) return kModifier == which;
    return which == Modifier::kSoftcap ? modifiers.softcap != 0.f
           : which == Modifier::kAlibi ? modifiers.alibi_slopes != nullptr
                                       : modifiers.rng != nullptr;
  }
  __device__ __forceinline__ bool bias_is_fp32() const {
    if constexpr (kModifier == Modifier::kBias) return false;
    if constexpr (kModifier == Modifier::kBiasFp32) return true;
    return modifiers.bias_is_fp32;
  }

  // Computes P of one fragment from S (`scores`), packed as operand A without dropout_scale, which
  // is applied to dV. `scores` then holds what dP - delta is to be multiplied by: P times the
  // derivative of softcap (kGradBias: P), negative where the element is dropped.
  __device__ __forceinline__ void exponentiate(int kk, const Values& lse, float* scores,
                                               uint32_t (&packed)[4]) {
    float exponent[8];  // log2 of P without the term of the score: ALiBi + bias - LSE
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float2 const shift = lse.of_tile(2 * kk + j);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        exponent[i] = i / Values::kRepeat % 2 == 0 ? -shift.x : -shift.y;
      }
    }
    if (has(Modifier::kAlibi)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float const offset = 16 * kk + i / 4 * 8 + i % 2 - i / 2 % 2 * 8;
        exponent[i] = fmaf(slope_log2, fabsf(kRowsAreKeys ? distance + offset : distance - offset),
                           exponent[i]);
      }
    }
    if constexpr (Config::kBias) {
      float added[8];
      BiasStage<Config>{bias}.template read<kRowsAreKeys>(kk, lane, bias_is_fp32(), added);
#pragma unroll
      for (int i = 0; i < 8; ++i) exponent[i] = fmaf(added[i], kLog2E, exponent[i]);
    }
    float p[8];
    if (has(Modifier::kSoftcap)) {
      Softcap const softcap(modifiers, modifiers.scale);
      float const cap_log2 = modifiers.softcap * kLog2E;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float const inverse = softcap.inverse(scores[i]);
        p[i] = exp2_approx(fmaf(-2.f * cap_log2, inverse, exponent[i] + cap_log2));
        scores[i] = Softcap::derivative_of_inverse(inverse);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        p[i] = exp2_approx(fmaf(scores[i], scale_log2, exponent[i]));
        scores[i] = 1.f;
      }
    }
    if (has(Modifier::kDropout)) {
      int32_t const offset = 16 * kk + chain[kk % 2];
      DropoutBits const bits =
          kRowsAreKeys ? rng.draw_transposed(query + offset, key) : rng.draw(query, key + offset);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int const row_half = i / 2 % 2, column_half = i / 4;
        bool const kept =
            kRowsAreKeys ? bits.keeps(column_half, i % 2, row_half, modifiers.dropout_threshold)
                         : bits.keeps(row_half, i % 2, column_half, modifiers.dropout_threshold);
        if (!kept) p[i] = -p[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[i] = Config::Dtype::pack_positive(p[2 * i], p[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (Config::kGradBias) {
        derivative[i] = scores[i];
        scores[i] = p[i];
      } else {
        scores[i] *= p[i];
      }
    }
    chain[kk % 2] = packed[3] >> 31;
  }

  // Computes dS of one fragment in place of dP (`grads`). `factors`: from exponentiate().
  __device__ __forceinline__ void differentiate(int kk, const Values& delta, const float* factors,
                                                float* grads) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float2 const sums = delta.of_tile(2 * kk + j);
      if (has(Modifier::kDropout)) {
        differentiate_dropped<Values>(&factors[4 * j], &grads[4 * j], modifiers.dropout_scale,
                                      sums);
      } else {
        attention::differentiate_tile<Values>(&factors[4 * j], &grads[4 * j], sums);
      }
    }
    if constexpr (kWantsGradBias) grad_bias.add(kk, grads);
    if (Config::kGradBias && has(Modifier::kSoftcap)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) grads[i] *= derivative[i];
    }
  }
};

// Computes P and dS, packed, from S and dP. Goes fragment by fragment, so that intermediates of a
// score are neither kept nor recomputed. `bias`: kBias: the address of the warp's BiasStage.
template <class Config, class Values, class Tile>
__device__ __forceinline__ void differentiate_with_modifiers(
    typename Scores<Config>::Registers& scores, typename Scores<Config>::Registers& grads,
    typename Scores<Config>::Packed& packed_p, typename Scores<Config>::Packed& packed_ds,
    const BwdProblem& problem, const Tile& tile, uint32_t head, const Values& lse,
    const Values& delta, int32_t first_key, int32_t first_query, uint32_t bias = 0) {
  dispatch_modifier<Config>(problem, [&](auto modifier) {
    ModifierStep<Config, modifier.value, Values> step(problem, tile, head, first_key, first_query,
                                                      bias);
#pragma unroll
    for (int kk = 0; kk < Scores<Config>::kSteps; ++kk) {
      step.exponentiate(kk, lse, &scores[8 * kk], packed_p[kk]);
      step.differentiate(kk, delta, &scores[8 * kk], &grads[8 * kk]);
      Scores<Config>::pack(&grads[8 * kk], packed_ds[kk]);
    }
  });
}

// Computes P, packed, from S; `scores` becomes the factor of dP - delta. `bias`: as above.
template <class Config, class Values, class Tile>
__device__ __forceinline__ void exponentiate_with_modifiers(
    typename Scores<Config>::Registers& scores, typename Scores<Config>::Packed& packed,
    const BwdProblem& problem, const Tile& tile, uint32_t head, const Values& lse,
    int32_t first_key, int32_t first_query, uint32_t bias) {
  dispatch_modifier<Config>(problem, [&](auto modifier) {
    ModifierStep<Config, modifier.value, Values> step(problem, tile, head, first_key, first_query,
                                                      bias);
#pragma unroll
    for (int kk = 0; kk < Scores<Config>::kSteps; ++kk) {
      step.exponentiate(kk, lse, &scores[8 * kk], packed[kk]);
    }
  });
}

// The factor that dV is multiplied by at the end.
template <class Config>
__device__ __forceinline__ float grad_v_scale(const BwdProblem& problem) {
  return Config::kModifiers ? problem.modifiers.dropout_scale : 1.f;
}

}  // namespace flashvar::sm90::attention
