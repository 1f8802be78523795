// Why a call takes the kernels that it takes, in words. Host only.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "core/text.h"

namespace flashvar::attention {

struct NamedTensor {
  const char* name;
  const Tensor& tensor;
};

// Prints the first row of these tensors that does not start at a multiple of 16 bytes, and why;
// false, with nothing printed, where all do.
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

// Of the mma.sync kernels, which take every call.
template <class Problem>
void explain_mma_sync(const Problem& problem, Text& text) {
  if (!print_unaligned(text, "mma.sync: rows are read in smaller pieces, for ", problem)) {
    text.print("mma.sync: rows are read 16 bytes at a time");
  }
}

// Of the wgmma kernels: `unsupported` says why not, null: they support the call but for what is
// printed here of its addresses and of the driver.
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
