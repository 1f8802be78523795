// Gradients of weights and biases. A block of the backward that has all tokens of its channels
// writes them; else each block writes its partial sums, and a kernel adds them up, in order.
#pragma once
#include <cstdint>

#include "causal_conv1d/tensors.cuh"
#include "causal_conv1d/tiles.h"
#include "ptx/grid_dependency.cuh"
#include "ptx/pin.cuh"

namespace flashvar::causal_conv1d {

struct SumsArgs {
  const float* parts;  // [count, kWidth + 1, dim]; [.., kWidth, ..] is the bias's
  int64_t count;
  int64_t dim;
  Tensor grad_weight, grad_bias;
  int32_t lanes_log2;  // columns of the parts per block; its other threads split the parts

  // Few parts are not split: each thread adds up a column. Otherwise a warp has 32 columns.
  static SumsArgs make(const BwdProblem& problem, int64_t count) {
    return {problem.parts,     count,
            problem.dim,       problem.grad_weight,
            problem.grad_bias, count <= kSumGroups ? kThreadsLog2 : 5};
  }
  int64_t blocks(int width) const {
    return ((width + 1) * dim + (int64_t{1} << lanes_log2) - 1) >> lanes_log2;
  }

 private:
  static constexpr int kThreadsLog2 = 8, kSumGroups = kThreads / 32;
  static_assert(kThreads == 1 << kThreadsLog2);
};

// Stores the gradient of a tap of a channel's weight; tap kWidth stands for its bias.
template <int kWidth>
__device__ __forceinline__ void store_sum(const Tensor& grad_weight, const Tensor& grad_bias,
                                          int64_t channel, int64_t tap, float sum) {
  if (tap < kWidth) {
    store(grad_weight, offset(grad_weight, 0, channel, tap), sum);
  } else if (grad_bias.data != nullptr) {
    store(grad_bias, offset(grad_bias, 0, 0, channel), sum);
  }
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads) sums_kernel(const __grid_constant__ SumsArgs args) {
  constexpr int kAtOnce = 8;
  __shared__ float sums[kThreads];
  ptx::griddepcontrol_launch_dependents();
  int const lanes = 1 << args.lanes_log2, groups = kThreads >> args.lanes_log2;
  int const lane = threadIdx.x & (lanes - 1), group = threadIdx.x >> args.lanes_log2;
  int64_t const columns = (kWidth + 1) * args.dim;
  int64_t const column = (int64_t{blockIdx.x} << args.lanes_log2) + lane;
  const float* from = args.parts + group * columns + column;
  // The division is done, and kept, before the wait.
  auto const tap = ptx::pin(static_cast<uint32_t>(column / args.dim));
  ptx::griddepcontrol_wait();  // the backward has written the parts
  float sum = 0.f;
  for (int64_t part = group; column < columns && part < args.count; part += groups * kAtOnce) {
    float values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, from += groups * columns) {
      values[i] = part + i * groups < args.count ? *from : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += values[i];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();  // all threads have written their sums
  if (group != 0 || column >= columns) return;
  for (int other = lanes; other < kThreads; other += lanes) sum += sums[other + lane];
  store_sum<kWidth>(args.grad_weight, args.grad_bias, column - tap * args.dim, tap, sum);
}

}  // namespace flashvar::causal_conv1d
