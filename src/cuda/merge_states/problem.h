// A merge_states call as launchers see it: validated by abi/merge_states_*.cc.
#pragma once
#include <cstdint>

#include "core/tensor_view.h"

namespace flashvar::merge_states {

// Parts whose addresses fit in the parameters of a kernel.
inline constexpr int kMaxAddresses = 224;

using Tensor = TensorView<void>;  // of the problem's dtype

// One tensor per part, all with the strides of `first`.
struct Parts {
  Tensor first;
  int64_t stride;                // elements from part to part of a stacked tensor
  const void* const* addresses;  // of each part, in host memory; null: stacked
};

struct Problem {
  int64_t batch;
  int64_t seqlen;  // batch and seqlen: below 2^31
  int32_t heads;
  int32_t head_dim;
  int32_t parts;
  Parts outs, lses;  // lses: fp32

  int64_t rows() const { return batch * seqlen * heads; }
};

struct FwdProblem : Problem {
  Tensor out;
  float* lse;  // [batch, heads, seqlen]; may be null
};

struct BwdProblem : Problem {
  Tensor grad_out;
  const float* grad_lse;  // [batch, heads, seqlen]; may be null
  Tensor grad_outs;       // stacked, without the skipped parts; data may be null: not wanted
  int64_t grad_outs_stride;
  uint64_t skipped_outs;  // bit i: grad_outs has no part for part i, which is below 64
  float* grad_lses;       // [parts, batch, heads, seqlen]; null: not wanted
};

}  // namespace flashvar::merge_states
