// A causal_conv1d call as launchers and kernels see it: validated by abi/causal_conv1d_*.cc.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashvar::causal_conv1d {

// A tensor of any dtype; strides are in elements. The stride of a dimension of size 1 is 0.
struct Tensor {
  void* data;  // null: there is none
  int64_t strides[3];
  unsigned dtype;  // flashvar_dtype
};

// An array of int32 or int64.
struct Indices {
  const void* data;  // null: there is none
  bool is_int64;
};

struct Problem {
  int64_t batch, seqlen, dim;
  int64_t sequences;   // the batch; varlen: sequences of the one batch entry; update: states
  Indices cu_seqlens;  // [sequences + 1]; null: each batch entry is a sequence
  int32_t width;       // 2 to 4
  int32_t columns;     // of a state
  bool silu;
  Tensor x;       // [batch, seqlen, dim]
  Tensor weight;  // [dim, width]: the first stride is 0
  Tensor bias;    // [dim]: the first two are 0
  Tensor state;   // [sequences, dim, columns]
};

struct FwdProblem : Problem {
  Tensor y;            // like x
  Tensor residual;     // like x
  Tensor final_state;  // [sequences, dim, final_columns]
  int32_t final_columns;

  __host__ __device__ int64_t final_elements() const { return sequences * dim * final_columns; }
};

struct BwdProblem : Problem {
  Tensor grad_x, grad_weight, grad_bias, grad_state;  // written
  Tensor grad_y;                                      // like x
  Tensor grad_final;                                  // [sequences, dim, final_columns]
  int32_t final_columns;
  float* parts;  // workspace: of the gradients of weight and bias

  __host__ __device__ int64_t state_elements() const {
    return grad_state.data == nullptr ? 0 : sequences * dim * columns;
  }
};

struct UpdateProblem : Problem {
  Tensor y, residual;  // like x
  Indices state_indices, state_positions;
};

}  // namespace flashvar::causal_conv1d
