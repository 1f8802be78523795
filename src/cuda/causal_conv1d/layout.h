// Decides along which dimension of a call's tensors threads load, and whether several elements at
// once. Host only.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "causal_conv1d/problem.h"
#include "core/text.h"

namespace flashvar::causal_conv1d {

// A tensor [batch, seqlen, dim] by the name that messages give it.
struct Operand {
  const char* name;
  const Tensor& tensor;
};

struct Layout {
  bool tokens_inner;  // tokens are contiguous; else channels are, or neither
  bool chunks;        // whether a thread loads several elements at once
  // If not: which operand prevents it, and why.
  const char* operand = nullptr;
  const char* what = nullptr;

  // `dtype`, `bytes`: of an element; `chunk_of(tokens)`: the bytes of a chunk of tokens or of
  // channels. The first operand is written.
  static Layout of(const Problem& problem, unsigned dtype, int bytes, int (*chunk_of)(bool),
                   std::initializer_list<Operand> operands) {
    const int64_t (&written)[3] = operands.begin()->tensor.strides;
    bool const tokens = problem.seqlen > 1 && (problem.dim == 1 || written[1] < written[2]);
    int const chunk = chunk_of(tokens);
    auto stop = [&](const char* operand, const char* what) {
      return Layout{tokens, false, operand, what};
    };
    int64_t const length = tokens ? problem.seqlen : problem.dim;
    if (length * bytes % chunk != 0) return stop("x", "the length of a row");
    for (const Operand& one : operands) {
      if (one.tensor.data == nullptr) continue;
      const int64_t (&strides)[3] = one.tensor.strides;
      if (one.tensor.dtype != dtype) return stop(one.name, "the dtype");
      if (strides[tokens ? 1 : 2] != 1) return stop(one.name, "the order of dimensions");
      if (reinterpret_cast<uintptr_t>(one.tensor.data) % chunk != 0) {
        return stop(one.name, "the address");
      }
      if ((strides[0] | strides[tokens ? 2 : 1]) * bytes % chunk != 0) {
        return stop(one.name, "a stride");
      }
    }
    return {tokens, true};
  }

  void explain(int chunk, Text& text) const {
    const char* const inner = tokens_inner ? "tokens" : "channels";
    if (chunks) {
      text.print("simt: along %s, %d bytes at a time", inner, chunk);
    } else {
      text.print("simt: along %s, element by element, for %s of %s does not allow %d bytes", inner,
                 what, operand, chunk);
    }
  }
};

}  // namespace flashvar::causal_conv1d
