// The rows of the generated kernel tables: one type per op, named <Op>Kernel.
#pragma once
#include <cuda_runtime_api.h>

#include "attention/problem.h"

namespace flashvar {

struct AttentionFwdKernel {
  unsigned dtype;  // flashvar_dtype
  int head_dim;    // serves head dims up to this
  int head_dim_v;  // and head dims of values up to this
  cudaError_t (*launch)(const attention::FwdProblem& problem, int device, cudaStream_t stream);
};

struct AttentionBwdKernel {
  unsigned dtype;
  int head_dim;
  int head_dim_v;
  uint64_t (*workspace)(const attention::BwdProblem& problem);  // bytes
  cudaError_t (*launch)(const attention::BwdProblem& problem, int device, cudaStream_t stream);
};

}  // namespace flashvar
