// The tensor maps of the backward's kernels. Host only.
#pragma once
#include "core/tensor_map.h"

namespace flashvar::sm90 {

// Of arguments.problem, in tiles of so many queries and keys.
template <class Arguments>
cudaError_t make_bwd_maps(Arguments& arguments, const TensorMapMaker& make, int block_q,
                          int block_kv) {
  const auto& problem = arguments.problem;
  cudaError_t error = make.queries(arguments.q, problem.q, problem.head_dim, block_q);
  if (error == cudaSuccess) {
    error = make.queries(arguments.grad_out, problem.grad_out, problem.head_dim_v, block_q);
  }
  if (error == cudaSuccess) error = make.keys(arguments.k, problem.k, problem.head_dim, block_kv);
  if (error == cudaSuccess) error = make.keys(arguments.v, problem.v, problem.head_dim_v, block_kv);
  return error;
}

}  // namespace flashvar::sm90
