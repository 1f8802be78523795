// A gated_delta_rule call as launchers and kernels see it: validated by
// abi/gated_delta_rule_problem.h.
#pragma once
#include <cstdint>

#include "core/sequences.cuh"
#include "core/tensor_view.h"

namespace flashvar::gated_delta_rule {

using Tensor = TensorView<uint16_t>;  // of 16-bit elements

// A value per token and head, or per head (the other strides are 0).
struct Gate {
  const void* data;  // may be null
  int64_t batch_stride, seq_stride, head_stride;
  unsigned dtype;  // flashvar_dtype
};

// [sequences, heads, head_dim, head_dim_v].
template <class Element>
struct StateView {
  Element* data;  // may be null
  int64_t sequence_stride, head_stride, k_stride, v_stride;
};
using State = StateView<float>;

// Fields of the problems of all functions: all except the states.
struct Problem {
  int64_t sequences;
  Sequences rows;
  int32_t heads_qk, heads, group;  // heads = group * heads_qk
  int32_t head_dim, head_dim_v;
  float scale;
  bool qk_l2norm, beta_sigmoid;
  float beta_scale;
  Tensor q, k, v, out;
  Gate g, beta, a_log, dt_bias;
};

struct FwdProblem : Problem {
  State initial_state, final_state;
  void* workspace;
};

// A Gate that is written. data may be null: the caller does not want it.
struct GradGate {
  void* data;
  int64_t batch_stride, seq_stride, head_stride;
  unsigned dtype;  // flashvar_dtype
};

// `out` and `final_state` are not set.
struct BwdProblem : FwdProblem {
  Tensor grad_out;
  State grad_final_state;  // data may be null: zeros
  Tensor grad_q, grad_k, grad_v;
  GradGate grad_g, grad_beta, grad_a_log, grad_dt_bias;
  State grad_initial_state;
};

// Which state each sequence has: integers of `bytes` bytes.
struct StateIndices {
  const void* data;  // [sequences]; null: sequence i has state i
  int64_t stride;
  uint32_t bytes;

#ifdef __CUDACC__
  __device__ __forceinline__ int64_t operator[](int64_t i) const {
    if (data == nullptr) return i;
    return bytes == sizeof(int32_t) ? static_cast<const int32_t*>(data)[i * stride]
                                    : static_cast<const int64_t*>(data)[i * stride];
  }
#endif
};

struct UpdateProblem : Problem {
  unsigned state_dtype;  // flashvar_dtype
  // May be the same tensor.
  StateView<void> initial_state, final_state;
  StateIndices state_indices;
  int64_t states;  // in a tensor of states
};

}  // namespace flashvar::gated_delta_rule
