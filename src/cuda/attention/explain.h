// The text of flashvar_attention_*_explain: which kernels a call launches, and why. Host only.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "core/text.h"

namespace flashvar::attention {

struct NamedTensor {
  const char* name;
  const Tensor& tensor;
};

// Prints which of these tensors has rows that do not start at a multiple of 16 bytes, and why; the
// first such tensor only. Returns false, with nothing printed, where all rows are aligned.
template <int kCount>
bool print_unaligned(Text& text, const char* before, const NamedTensor (&tensors)[kCount]) {
  for (const NamedTensor& one : tensors) {
    constexpr int kElements = 16 / sizeof(*one.tensor.data);
    if (auto const beyond = reinterpret_cast<uintptr_t>(one.tensor.data) % 16; beyond != 0) {
      // Not the address itself: callers log each text once, whatever the addresses.
      text.print("%s%s: its address is %d bytes beyond a multiple of 16", before, one.name,
                 static_cast<int>(beyond));
      return true;
    }
    const struct {
      const char* name;
      int64_t stride;
    } strides[] = {{"batch", one.tensor.batch_stride},
                   {"sequence", one.tensor.seq_stride},
                   {"heads", one.tensor.head_stride}};
    for (const auto& [name, stride] : strides) {
      if (stride % kElements == 0) continue;
      text.print("%s%s: its %s stride, %lld, is no multiple of %d", before, one.name, name,
                 static_cast<long long>(stride), kElements);
      return true;
    }
  }
  return false;
}

inline bool print_unaligned(Text& text, const char* before, const FwdProblem& p) {
  return print_unaligned(text, before, {{"q", p.q}, {"k", p.k}, {"v", p.v}, {"out", p.out}});
}

inline bool print_unaligned(Text& text, const char* before, const BwdProblem& p) {
  return print_unaligned(text, before,
                         {{"q", p.q},
                          {"k", p.k},
                          {"v", p.v},
                          {"out", p.out},
                          {"grad_out", p.grad_out},
                          {"grad_q", p.grad_q},
                          {"grad_k", p.grad_k},
                          {"grad_v", p.grad_v}});
}

// For launchers of the mma.sync kernels, which support every call.
template <class Problem>
void explain_mma_sync(const Problem& problem, Text& text) {
  if (!print_unaligned(text, "mma.sync: rows are read in smaller pieces, for ", problem)) {
    text.print("mma.sync: rows are read 16 bytes at a time");
  }
}

// For launchers that prefer the wgmma kernels. `unsupported`: why those do not support the call
// whatever its addresses, or null. Alignment and the driver are examined here.
template <class Problem>
void explain_wgmma(const Problem& problem, const char* unsupported, bool has_tensor_maps,
                   Text& text) {
  if (unsupported != nullptr) {
    text.print("mma.sync: %s", unsupported);
  } else if (print_unaligned(text, "mma.sync: TMA cannot address rows of ", problem)) {
    return;
  } else if (!has_tensor_maps) {
    text.print("mma.sync: the driver cannot encode tensor maps for TMA");
  } else {
    text.print("wgmma: every row starts on 16 bytes, so TMA can address it");
  }
}

}  // namespace flashvar::attention
