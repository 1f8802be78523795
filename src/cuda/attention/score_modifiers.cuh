// Score modifiers: softcap, ALiBi and bias, which are applied between q . k and the mask, and the
// derivative of softcap for the backward. In natural-log units:
//
//   s = scale (q . k);  s = softcap(s);  s += alibi;  s += bias
//
// Each is a function of one element at (row, column) of its sequence, so that kernels may hold
// scores in either orientation. All blocks of a grid have the same modifiers, so that kernels
// branch outside of their loops over elements.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "core/math.cuh"
#include "ptx/prefetch.cuh"

namespace flashvar::attention {

// Softcap: s -> cap tanh(scale s / cap), with an absolute error of at most 5e-7 cap. It is computed
// with exp2, because the error of tanh.approx is 5e-4.
struct Softcap {
  float cap;
  float exponent;  // exp2(s * exponent) = exp(2 scale s / cap)

  // For scores that are already scaled.
  explicit __device__ __forceinline__ Softcap(float cap_)
      : cap(cap_), exponent(2.f / kLn2 / cap_) {}
  // For unscaled scores. The mma.sync kernels do not use it: the compiler would hoist the product
  // out of their loops, into registers that they do not have.
  __device__ __forceinline__ Softcap(const ScoreModifiers& modifiers, float scale)
      : cap(modifiers.softcap), exponent(modifiers.softcap_exponent * scale) {}

  // 1 / (e + 1) with e = exp2(score * exponent); also right for e = 0 and e = infinity. The capped
  // score is cap (1 - 2 inverse).
  __device__ __forceinline__ float inverse(float score) const {
    return reciprocal_approx(exp2_approx(score * exponent) + 1.f);
  }

  __device__ __forceinline__ float operator()(float score) const {
    return cap - 2.f * cap * inverse(score);
  }

  // Derivative of the capped score, from the capped score (before ALiBi and bias) or from
  // inverse().
  __device__ __forceinline__ float derivative(float capped) const {
    float const tanh = __fdividef(capped, cap);
    return 1.f - tanh * tanh;
  }
  __device__ __forceinline__ static float derivative_of_inverse(float inverse) {
    return 4.f * fmaf(-inverse, inverse, inverse);
  }
};

// ALiBi: the bias -slope |diagonal(row) - column|.
struct Alibi {
  float slope;
  int32_t shift;  // diagonal(row) - row

  __device__ __forceinline__ Alibi(const Problem& problem, uint32_t batch, uint32_t head,
                                   int32_t seqlen_q, int32_t seqlen_k)
      : slope(problem.modifiers.alibi_slopes[batch * problem.modifiers.alibi_batch_stride + head]),
        shift(seqlen_k - seqlen_q) {}

  // diagonal(row) - column. A float, so that unrolled loops add float constants to it.
  __device__ __forceinline__ float distance(int32_t row, int32_t column) const {
    return static_cast<float>(row + shift - column);
  }

  __device__ __forceinline__ float operator()(float distance) const {
    return -slope * fabsf(distance);
  }
};

// The bias of one head. Element is the kernel's Dtype or, where bias_is_fp32, dtype::fp32. Elements
// are aligned to their own size only.
template <class Element>
struct Bias {
  using Word = typename Element::Word;
  const Word* data;  // row 0 of the head
  int64_t row_stride;
  int32_t rows, columns;  // extents of the tensor

  __device__ __forceinline__ Bias(const Problem& problem, uint32_t batch, uint32_t head)
      : data(static_cast<const Word*>(problem.modifiers.bias.data) +
             batch * problem.modifiers.bias.batch_stride +
             head * problem.modifiers.bias.head_stride),
        row_stride(problem.modifiers.bias.query_stride),
        rows(problem.queries.seqlen),
        columns(problem.keys.seqlen) {}

  // The element, or 0 outside the tensor.
  __device__ __forceinline__ float operator()(int32_t row, int32_t column) const {
    if (row >= rows || column >= columns) return 0.f;
    return Element::unpack(data[row * row_stride + column]);
  }

  // Whether the elements at an even column and the next may be read in one access.
  __device__ __forceinline__ bool has_pairs() const {
    return reinterpret_cast<uintptr_t>(data) % (2 * sizeof(Word)) == 0 && row_stride % 2 == 0 &&
           columns % 2 == 0;
  }

  // The elements at an even column and the next. Precondition: has_pairs().
  __device__ __forceinline__ float2 pair(int32_t row, int32_t column) const {
    if (row >= rows || column >= columns) return {0.f, 0.f};
    struct alignas(2 * sizeof(Word)) Pair {
      Word first, second;
    };
    Pair const words = *reinterpret_cast<const Pair*>(data + row * row_stride + column);
    return {Element::unpack(words.first), Element::unpack(words.second)};
  }

  // Prefetches `count` columns of a row into L2.
  __device__ __forceinline__ void prefetch(int32_t row, int32_t column, int32_t count) const {
    constexpr int32_t kLine = 128 / sizeof(Word);  // elements of a 128-byte line of L2
    if (row >= rows) return;
    for (int32_t c = column; c < min(column + count, columns); c += kLine) {
      ptx::prefetch_l2(data + row * row_stride + c);
    }
  }
};

}  // namespace flashvar::attention
