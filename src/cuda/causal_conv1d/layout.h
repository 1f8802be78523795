// Decides along which dimension of a call's tensors threads load, and whether several elements at
// once. Host only.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "causal_conv1d/problem.h"
#include "causal_conv1d/tiles.h"
#include "core/text.h"

namespace flashvar::causal_conv1d {

// A tensor [batch, seqlen, dim] by the name that messages give it.
struct Operand {
  const char* name;
  const Tensor& tensor;
};

struct Layout {
  bool tokens_inner;          // tokens are contiguous; else channels are, or neither
  bool vectorized;            // whether a thread loads several elements at once
  Misalignment misalignment;  // of contiguous tokens that are loaded so
  // Where a thread loads one element at a time: the operand that prevents more, and either which
  // property of it does (`what`), or the operand with whose rows its rows are not aligned
  // (`elsewhere`).
  const char* operand = nullptr;
  const char* what = nullptr;
  const char* elsewhere = nullptr;

  // `dtype`, `bytes`: of an element; `vector_bytes_of(tokens)`: the bytes of tokens or of channels
  // that a thread loads at once. The first operand is written.
  static Layout of(const Problem& problem, unsigned dtype, int bytes, int (*vector_bytes_of)(bool),
                   std::initializer_list<Operand> operands) {
    const int64_t (&written)[3] = operands.begin()->tensor.strides;
    bool const tokens = problem.seqlen > 1 && (problem.dim == 1 || written[1] < written[2]);
    int const vector_bytes = vector_bytes_of(tokens);
    auto stop = [&](const char* operand, const char* what) {
      return Layout{tokens, false, {}, operand, what};
    };
    if (!tokens && problem.dim * bytes % vector_bytes != 0) return stop("x", "the length of a row");
    // Rows of channels begin at multiples of these bytes, those of tokens anywhere, but at the same
    // distance from one in all tensors.
    auto const found_in = [&](const Tensor& of) {
      return misalignment_of(of, tokens, bytes, vector_bytes);
    };
    Misalignment const wanted = tokens ? found_in(operands.begin()->tensor) : Misalignment{};
    const char* const first = operands.begin()->name;
    for (const Operand& one : operands) {
      if (one.tensor.data == nullptr) continue;
      if (one.tensor.dtype != dtype) return stop(one.name, "the dtype");
      if (one.tensor.strides[tokens ? 1 : 2] != 1) {
        return stop(one.name, "the order of dimensions");
      }
      Misalignment const found = found_in(one.tensor);
      if (found == wanted) continue;
      if (tokens) return Layout{tokens, false, {}, one.name, nullptr, first};
      return stop(one.name, found.first == 0 ? "a stride" : "the address");
    }
    return {tokens, true, wanted};
  }

  // `bytes`: of an element; `vector_bytes`: of what a thread loads at once.
  static Misalignment misalignment_of(const Tensor& tensor, bool tokens, int bytes,
                                      int vector_bytes) {
    auto const elements = static_cast<uint64_t>(vector_bytes / bytes);
    auto const modulo = [&](uint64_t count) { return static_cast<uint32_t>(count % elements); };
    return {modulo(reinterpret_cast<uintptr_t>(tensor.data) / bytes),
            modulo(static_cast<uint64_t>(tensor.strides[0])),
            modulo(static_cast<uint64_t>(tensor.strides[tokens ? 2 : 1]))};
  }

  void explain(int vector_bytes, Text& text) const {
    const char* const inner = tokens_inner ? "tokens" : "channels";
    if (vectorized) {
      text.print("simt: along %s, %d bytes at a time", inner, vector_bytes);
    } else if (elsewhere != nullptr) {
      text.print(
          "simt: along %s, element by element, for rows of %s begin elsewhere within %d bytes than "
          "those of %s",
          inner, operand, vector_bytes, elsewhere);
    } else {
      text.print("simt: along %s, element by element, for %s of %s does not allow %d bytes", inner,
                 what, operand, vector_bytes);
    }
  }
};

}  // namespace flashvar::causal_conv1d
