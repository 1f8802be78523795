// Element-wise P and dS from S = q . k and dP = dO . v, with either orientation of the scores.
#pragma once
#include <cstdint>

#include "attention/dropout.cuh"
#include "attention/score_modifiers.cuh"
#include "core/dtype.cuh"
#include "core/math.cuh"
#include "sm80/attention/key_tile.cuh"
#include "sm80/gemm.cuh"

namespace flashvar::sm80::attention {

// Query and key of a lane's first score, and the tile's mask.
struct BwdScoreOrigin {
  uint32_t batch;
  int32_t head;
  int32_t query, key;
  Mask mask;
  bool masked;  // the mask hides some scores of the tile
};

// Query and key of element e of mma tile (m, n), relative to the lane's first score. kTransposed:
// rows are keys, columns queries.
template <bool kTransposed>
__device__ __forceinline__ constexpr int score_query(int m, int n, int e) {
  return kTransposed ? n * 8 + e % 2 : m * 16 + e / 2 * 8;
}
template <bool kTransposed>
__device__ __forceinline__ constexpr int score_key(int m, int n, int e) {
  return kTransposed ? m * 16 + e / 2 * 8 : n * 8 + e % 2;
}

// Zeros P of hidden keys; rows are keys. Keys past the end are visible to no query.
template <class Acc>
__device__ __forceinline__ void apply_mask(Acc& rP, const BwdScoreOrigin& origin) {
#pragma unroll
  for (int m = 0; m < rP.kMmaRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t const key = origin.key + m * 16 + half * 8;
      int32_t const begin = origin.mask.query_begin(key) - origin.query;
      int32_t const end =
          key < origin.mask.seqlen_k ? origin.mask.query_end(key) - origin.query : INT32_MIN;
#pragma unroll
      for (int n = 0; n < rP.kMmaCols; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e < begin || n * 8 + e >= end) rP.tile[m][n][half * 2 + e] = 0.f;
        }
      }
    }
  }
}

// Eight scores of two adjacent mma tiles: element i is tile[n + i / 4][i % 4].
struct ScoreGroup {
  float score[8];  // S; then P; then P after dropout
  float grad[8];   // dP; then dS
  float kept[8];   // factor of dropout: 0 or dropout_scale
};

// Adds the bias to the scores of a group.
template <bool kTransposed, class Element>
__device__ __forceinline__ void add_bias(ScoreGroup& g, const BwdArgs& args,
                                         const BwdScoreOrigin& origin, int m, int n) {
  Bias<Element> const bias(args, origin.batch, origin.head);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    g.score[i] += bias(origin.query + score_query<kTransposed>(m, n + i / 4, i % 4),
                       origin.key + score_key<kTransposed>(m, n + i / 4, i % 4));
  }
}

// Adds dS of a group to the gradient of the bias.
template <bool kTransposed>
__device__ __forceinline__ void add_grad_bias(const ScoreGroup& g, const BwdArgs& args,
                                              const BwdScoreOrigin& origin, int m, int n) {
  const BiasView& view = args.grad_bias;
  float* const base = static_cast<float*>(view.data) + origin.batch * view.batch_stride +
                      origin.head * view.head_stride;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int32_t const query = origin.query + score_query<kTransposed>(m, n + i / 4, i % 4);
    int32_t const key = origin.key + score_key<kTransposed>(m, n + i / 4, i % 4);
    if (query >= origin.mask.seqlen_q || key >= origin.mask.seqlen_k) continue;
    float* const to = base + query * view.query_stride + key;
    if (args.shared_bias) {
      atomicAdd(to, g.grad[i]);
    } else {
      *to += g.grad[i];
    }
  }
}

// Sets g.kept of the group at mma tiles (m, n) and (m, n + 1).
template <bool kTransposed>
__device__ __forceinline__ void drop(ScoreGroup& g, const ScoreModifiers& modifiers,
                                     const DropoutRng& rng, const BwdScoreOrigin& origin, int m,
                                     int n) {
  uint32_t const query = origin.query + score_query<kTransposed>(m, n, 0);
  uint32_t const key = origin.key + score_key<kTransposed>(m, n, 0);
  DropoutBits const bits = kTransposed ? rng.draw_transposed(query, key) : rng.draw(query, key);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int const row = i / 2 % 2, column = i / 4;  // halves of the 16 x 16 accumulator fragment
    bool const kept = bits.keeps(kTransposed ? column : row, i % 2, kTransposed ? row : column,
                                 modifiers.dropout_threshold);
    g.kept[i] = kept ? modifiers.dropout_scale : 0.f;
  }
}

// Computes P from S in rS, and dS from dP in rdP. lse_log2(m, n, e) and delta(m, n, e): those of
// the element's query. All modifiers in one pass over eight scores, so that no intermediate is kept
// or computed twice.
template <bool kTransposed, class Dtype, class Acc, class Lse, class Delta>
__device__ __forceinline__ void differentiate_with_modifiers(Acc& rS, Acc& rdP, const BwdArgs& args,
                                                             const BwdScoreOrigin& origin,
                                                             Lse&& lse_log2, Delta&& delta) {
  const ScoreModifiers& modifiers = args.modifiers;
#pragma unroll
  for (int m = 0; m < rS.kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < rS.kMmaCols; n += 2) {
      ScoreGroup g;
      auto each = [&](auto&& visit) {
#pragma unroll
        for (int i = 0; i < 8; ++i) visit(i, n + i / 4, i % 4);
      };
      float capped[8];
      each([&](int i, int n, int e) {
        g.score[i] = rS.tile[m][n][e] * modifiers.scale;
        g.grad[i] = rdP.tile[m][n][e];
      });
      if (modifiers.softcap != 0.f) {
        Softcap const softcap(modifiers.softcap);
        each([&](int i, int, int) { capped[i] = g.score[i] = softcap(g.score[i]); });
      }
      if (modifiers.alibi_slopes != nullptr) {
        Alibi const alibi(args, origin.batch, origin.head, origin.mask.seqlen_q,
                          origin.mask.seqlen_k);
        each([&](int i, int n, int e) {
          g.score[i] += alibi(alibi.distance(origin.query + score_query<kTransposed>(m, n, e),
                                             origin.key + score_key<kTransposed>(m, n, e)));
        });
      }
      if (modifiers.bias.data != nullptr) {
        if (modifiers.bias_is_fp32) {
          add_bias<kTransposed, dtype::fp32>(g, args, origin, m, n);
        } else {
          add_bias<kTransposed, Dtype>(g, args, origin, m, n);
        }
      }
      if (origin.masked) {
        each([&](int i, int n, int e) {
          int32_t const query = origin.query + score_query<kTransposed>(m, n, e);
          int32_t const key = origin.key + score_key<kTransposed>(m, n, e);
          if (key < origin.mask.key_begin(query) || key >= origin.mask.key_end(query)) {
            g.score[i] = -infinity();
          }
        });
      }
      each([&](int i, int n, int e) {
        g.score[i] = exp2_approx(g.score[i] * kLog2E - lse_log2(m, n, e));
        g.kept[i] = 1.f;
      });
      if (modifiers.rng != nullptr) {
        DropoutRng const rng(modifiers.rng, origin.batch * args.heads_q + origin.head);
        drop<kTransposed>(g, modifiers, rng, origin, m, n);
      }
      each([&](int i, int n, int e) {
        g.grad[i] = g.score[i] * (g.kept[i] * g.grad[i] - delta(m, n, e));
        g.score[i] *= g.kept[i];
      });
      if (kTransposed && args.grad_bias.data != nullptr) {
        add_grad_bias<kTransposed>(g, args, origin, m, n);
      }
      if (modifiers.softcap != 0.f) {
        Softcap const softcap(modifiers.softcap);
        each([&](int i, int, int) { g.grad[i] *= softcap.derivative(capped[i]); });
      }
      each([&](int i, int n, int e) {
        rS.tile[m][n][e] = g.score[i];
        rdP.tile[m][n][e] = g.grad[i];
      });
    }
  }
}

}  // namespace flashvar::sm80::attention
