// The gradient of the bias in the dK and dV kernel.
#pragma once
#include <cstdint>

#include "attention/mask.cuh"
#include "attention/problem.h"
#include "ptx/vectors.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// Adds dS to a thread's elements of the gradient, atomically. Rows of scores are keys. Where the
// bias is not broadcast each element is added to once; otherwise the order of the sums is open, as
// in the mma.sync kernels.
struct GradBias {
  float* first;  // the element of the thread's first score; null: not wanted
  int64_t query_stride;
  int32_t begin[2], end[2];  // queries that see the thread's two keys, relative to its first

  GradBias() = default;
  __device__ __forceinline__ GradBias(const BwdProblem& problem, const Mask& mask, uint32_t batch,
                                      uint32_t head, int32_t key, int32_t query)
      : first(static_cast<float*>(problem.grad_bias.data)),
        query_stride(problem.grad_bias.query_stride) {
    if (first == nullptr) return;
    first += batch * problem.grad_bias.batch_stride + head * problem.grad_bias.head_stride +
             query * query_stride + key;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t const row = key + half * 8;
      begin[half] = mask.query_begin(row) - query;
      end[half] = row < mask.seqlen_k ? mask.query_end(row) - query : INT32_MIN;
    }
  }

  // Adds dS of fragment kk: the mma tiles 2 kk and 2 kk + 1.
  __device__ __forceinline__ void add(int kk, const float* grads) const {
    if (first == nullptr) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int const query = 16 * kk + i / 4 * 8 + i % 2, half = i / 2 % 2;
      ptx::global_add(first + query * query_stride + half * 8, grads[i],
                      query >= begin[half] && query < end[half]);
    }
  }
};

}  // namespace flashvar::sm90::attention
