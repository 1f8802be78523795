// From q . k and dO . v to P and dS, element by element, in either orientation of the scores.
#pragma once
#include <cstdint>

#include "core/dropout.cuh"
#include "core/dtype.cuh"
#include "core/online_softmax.cuh"
#include "core/score_modification.cuh"
#include "sm80/attention_bwd_block.cuh"
#include "sm80/attention_bwd_products.cuh"

namespace flashvar::sm80 {

// Where a lane's first score lies in the matrix of scores of one head.
struct ScorePlace {
  uint32_t batch;
  int32_t head;
  int32_t query, key;
  Mask mask;
  bool masked;  // some scores of the tile are hidden
};

// Query and key of a lane's score, from its first. kTransposed: the rows are keys.
template <bool kTransposed>
__device__ __forceinline__ constexpr int score_query(int m, int n, int e) {
  return kTransposed ? n * 8 + e % 2 : m * 16 + e / 2 * 8;
}
template <bool kTransposed>
__device__ __forceinline__ constexpr int score_key(int m, int n, int e) {
  return kTransposed ? m * 16 + e / 2 * 8 : n * 8 + e % 2;
}

// No weight for the queries that do not see a key; the rows are keys. Keys past the end are seen by
// none.
template <class Accumulator>
__device__ __forceinline__ void hide_queries(Accumulator& rP, const ScorePlace& place) {
#pragma unroll
  for (int m = 0; m < rP.kMmaRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t const key = place.key + m * 16 + half * 8;
      int32_t const begin = place.mask.seeing_begin(key) - place.query;
      int32_t const end =
          key < place.mask.seqlen_k ? place.mask.seeing_end(key) - place.query : INT32_MIN;
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

// Eight scores that lie in two neighbouring mma tiles: tile[n + i / 4][i % 4].
struct ScoreGroup {
  float score[8];  // then the weight P, dropped where dropout drops it
  float grad[8];   // dP, then dS
  float kept[8];   // what dropout makes of a weight: 0, or the factor by which it grows
};

template <bool kTransposed, class Element>
__device__ __forceinline__ void add_bias(ScoreGroup& g, const AttentionBwdArguments& args,
                                         const ScorePlace& place, int m, int n) {
  Bias<Element> const bias(args, place.batch, place.head);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    g.score[i] += bias(place.query + score_query<kTransposed>(m, n + i / 4, i % 4),
                       place.key + score_key<kTransposed>(m, n + i / 4, i % 4));
  }
}

template <bool kTransposed>
__device__ __forceinline__ void add_grad_bias(const ScoreGroup& g,
                                              const AttentionBwdArguments& args,
                                              const ScorePlace& place, int m, int n) {
  const BiasView& view = args.grad_bias;
  float* const base = static_cast<float*>(view.data) + place.batch * view.batch_stride +
                      place.head * view.head_stride;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int32_t const query = place.query + score_query<kTransposed>(m, n + i / 4, i % 4);
    int32_t const key = place.key + score_key<kTransposed>(m, n + i / 4, i % 4);
    if (query >= place.mask.seqlen_q || key >= place.mask.seqlen_k) continue;
    float* const to = base + query * view.query_stride + key;
    if (args.shared_bias) {
      atomicAdd(to, g.grad[i]);
    } else {
      *to += g.grad[i];
    }
  }
}

template <bool kTransposed>
__device__ __forceinline__ void drop(ScoreGroup& g, const ScoreFeatures& features,
                                     const DropoutWords& words, const ScorePlace& place, int m,
                                     int n) {
  uint32_t const query = place.query + score_query<kTransposed>(m, n, 0);
  uint32_t const key = place.key + score_key<kTransposed>(m, n, 0);
  DropoutBits const bits =
      kTransposed ? words.along_rows(query, key) : words.along_columns(query, key);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int const row = i / 2 % 2, column = i / 4;  // halves of the patch, as the accumulators lie
    bool const kept = bits.keeps(kTransposed ? column : row, i % 2, kTransposed ? row : column,
                                 features.dropout_threshold);
    g.kept[i] = kept ? features.dropout_scale : 0.f;
  }
}

// rS: from q . k to P. rdP: from dO . v to dS. lse_log2(m, n, e) and row_sum(m, n, e) are those of
// the score's query.
template <bool kTransposed, class Dtype, class Accumulator, class Lse, class RowSum>
__device__ __forceinline__ void differentiate(Accumulator& rS, Accumulator& rdP,
                                              const AttentionBwdArguments& args,
                                              const ScorePlace& place, Lse&& lse_log2,
                                              RowSum&& row_sum) {
  const ScoreFeatures& features = args.features;
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
        g.score[i] = rS.tile[m][n][e] * features.scale;
        g.grad[i] = rdP.tile[m][n][e];
      });
      if (features.softcap != 0.f) {
        Softcap const softcap(features.softcap);
        each([&](int i, int, int) { capped[i] = g.score[i] = softcap(g.score[i]); });
      }
      if (features.alibi_slopes != nullptr) {
        Alibi const alibi(args, place.batch, place.head, place.mask.seqlen_q, place.mask.seqlen_k);
        each([&](int i, int n, int e) {
          g.score[i] += alibi(alibi.distance(place.query + score_query<kTransposed>(m, n, e),
                                             place.key + score_key<kTransposed>(m, n, e)));
        });
      }
      if (features.bias.data != nullptr) {
        if (features.bias_is_fp32) {
          add_bias<kTransposed, dtype::fp32>(g, args, place, m, n);
        } else {
          add_bias<kTransposed, Dtype>(g, args, place, m, n);
        }
      }
      if (place.masked) {
        each([&](int i, int n, int e) {
          int32_t const query = place.query + score_query<kTransposed>(m, n, e);
          int32_t const key = place.key + score_key<kTransposed>(m, n, e);
          if (key < place.mask.visible_begin(query) || key >= place.mask.visible_end(query)) {
            g.score[i] = -infinity();
          }
        });
      }
      each([&](int i, int n, int e) {
        g.score[i] = exp2_approx(g.score[i] * (1.f / kLn2) - lse_log2(m, n, e));
        g.kept[i] = 1.f;
      });
      if (features.rng != nullptr) {
        DropoutWords const words(features.rng, place.batch * args.heads_q + place.head);
        drop<kTransposed>(g, features, words, place, m, n);
      }
      each([&](int i, int n, int e) {
        g.grad[i] = g.score[i] * (g.kept[i] * g.grad[i] - row_sum(m, n, e));
        g.score[i] *= g.kept[i];
      });
      if (kTransposed && args.grad_bias.data != nullptr) {
        add_grad_bias<kTransposed>(g, args, place, m, n);
      }
      if (features.softcap != 0.f) {
        Softcap const softcap(features.softcap);
        each([&](int i, int, int) { g.grad[i] *= softcap.derivative(capped[i]); });
      }
      each([&](int i, int n, int e) {
        rS.tile[m][n][e] = g.score[i];
        rdP.tile[m][n][e] = g.grad[i];
      });
    }
  }
}

}  // namespace flashvar::sm80
