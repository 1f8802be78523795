// What becomes of a score between q . k and the mask, and what a backward needs to undo it. Every
// function is of one element at a (row, column) of its sequence, so that a kernel may hold scores
// in any orientation. All of it in natural-log units:
//   s = scale (q . k);  s = softcap(s);  s += alibi;  s += bias
// Which features a call has is uniform over the grid: ask before a loop, not within it.
#pragma once
#include <cstdint>

#include "core/online_softmax.cuh"
#include "core/problem.h"

namespace flashvar {

// s -> cap tanh(scale s / cap), within 5e-7 cap. By exp2, as tanh.approx errs by 5e-4.
struct Softcap {
  float cap;
  float exponent;  // of s: exp2(s * exponent) = exp(2 scale s / cap)

  // Of scores that are scaled already.
  explicit __device__ __forceinline__ Softcap(float cap_)
      : cap(cap_), exponent(2.f / kLn2 / cap_) {}
  // Of scores that `scale` is yet to be applied to. Mma.sync's kernels, short of registers, would
  // work this out ahead of their loops, and keep it.
  __device__ __forceinline__ Softcap(const ScoreFeatures& features, float scale)
      : cap(features.softcap), exponent(features.softcap_exponent * scale) {}

  // 1 / (e + 1), which is right for an e of 0 and of infinity as well: the capped score is
  // cap (1 - 2 inverse).
  __device__ __forceinline__ float inverse(float score) const {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(exp2_approx(score * exponent) + 1.f));
    return inverse;
  }

  __device__ __forceinline__ float operator()(float score) const {
    return cap - 2.f * cap * inverse(score);
  }

  // d capped / d score, from the capped score before anything is added to it, or from inverse().
  __device__ __forceinline__ float derivative(float capped) const {
    float const tanh = __fdividef(capped, cap);
    return 1.f - tanh * tanh;
  }
  __device__ __forceinline__ static float derivative_of_inverse(float inverse) {
    return 4.f * fmaf(-inverse, inverse, inverse);
  }
};

// -slope |diagonal(row) - column|.
struct Alibi {
  float slope;
  int32_t shift;  // diagonal(row) - row

  __device__ __forceinline__ Alibi(const AttentionProblem& problem, uint32_t batch, uint32_t head,
                                   int32_t seqlen_q, int32_t seqlen_k)
      : slope(problem.features.alibi_slopes[batch * problem.features.alibi_batch_stride + head]),
        shift(seqlen_k - seqlen_q) {}

  // From the diagonal of a row to a column. A float: unrolled loops add their constants to it.
  __device__ __forceinline__ float distance(int32_t row, int32_t column) const {
    return static_cast<float>(row + shift - column);
  }

  __device__ __forceinline__ float operator()(float distance) const {
    return -slope * fabsf(distance);
  }
};

// The bias of one head, whose elements are aligned to their own size only. Element is the kernel's
// Dtype or dtype::fp32: which, is uniform over the grid as well (bias_is_fp32).
template <class Element>
struct Bias {
  using Word = typename Element::Word;
  const Word* data;  // of the head's row 0
  int64_t row_stride;
  int32_t rows, columns;  // of the tensor: nothing is read outside of them

  __device__ __forceinline__ Bias(const AttentionProblem& problem, uint32_t batch, uint32_t head)
      : data(static_cast<const Word*>(problem.features.bias.data) +
             batch * problem.features.bias.batch_stride + head * problem.features.bias.head_stride),
        row_stride(problem.features.bias.query_stride),
        rows(problem.queries.seqlen),
        columns(problem.keys.seqlen) {}

  // 0 outside of the tensor.
  __device__ __forceinline__ float operator()(int32_t row, int32_t column) const {
    if (row >= rows || column >= columns) return 0.f;
    return Element::unpack(data[row * row_stride + column]);
  }

  // Whether pairs of elements at even columns may be read at once.
  __device__ __forceinline__ bool has_pairs() const {
    return reinterpret_cast<uintptr_t>(data) % (2 * sizeof(Word)) == 0 && row_stride % 2 == 0 &&
           columns % 2 == 0;
  }

  // Of an even column and the next.
  __device__ __forceinline__ float2 pair(int32_t row, int32_t column) const {
    if (row >= rows || column >= columns) return {0.f, 0.f};
    struct alignas(2 * sizeof(Word)) Pair {
      Word first, second;
    };
    Pair const words = *reinterpret_cast<const Pair*>(data + row * row_stride + column);
    return {Element::unpack(words.first), Element::unpack(words.second)};
  }

  // Brings `count` columns of a row closer.
  __device__ __forceinline__ void prefetch(int32_t row, int32_t column, int32_t count) const {
    constexpr int32_t kLine = 128 / sizeof(Word);
    if (row >= rows) return;
    for (int32_t c = column; c < min(column + count, columns); c += kLine) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(data + row * row_stride + c));
    }
  }
};

}  // namespace flashvar
