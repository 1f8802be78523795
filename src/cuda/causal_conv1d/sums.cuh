// Gradients of weights and biases: each block of the backward writes its partial sums, and a kernel
// adds them up, in order.
#pragma once
#include <cstdint>

#include "causal_conv1d/tensors.cuh"
#include "causal_conv1d/tiles.h"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

struct SumsArgs {
  const float* parts;  // [count, kWidth + 1, dim]; [.., kWidth, ..] is the bias's
  int64_t count;
  int64_t dim;
  Tensor grad_weight, grad_bias;
};

inline constexpr int kSumLanes = 32;  // channels per block; its other threads split the parts

template <int kWidth>
__global__ void __launch_bounds__(kThreads) sums_kernel(const __grid_constant__ SumsArgs args) {
  constexpr int kGroups = kThreads / kSumLanes, kAtOnce = 8;
  __shared__ float sums[kGroups][kSumLanes];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the backward has written the parts
  int const lane = threadIdx.x % kSumLanes, group = threadIdx.x / kSumLanes;
  int64_t const columns = (kWidth + 1) * args.dim;
  int64_t const column = int64_t{blockIdx.x} * kSumLanes + lane;
  float sum = 0.f;
  for (int64_t part = group; column < columns && part < args.count; part += kGroups * kAtOnce) {
    float values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int64_t const one = part + i * kGroups;
      values[i] = one < args.count ? args.parts[one * columns + column] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += values[i];
  }
  sums[group][lane] = sum;
  __syncthreads();  // all threads have written their sums
  if (group != 0 || column >= columns) return;
  for (int other = 1; other < kGroups; ++other) sum += sums[other][lane];
  int64_t const tap = column / args.dim, channel = column - tap * args.dim;
  if (tap < kWidth) {
    store(args.grad_weight, offset(args.grad_weight, 0, channel, tap), sum);
  } else if (args.grad_bias.data != nullptr) {
    store(args.grad_bias, offset(args.grad_bias, 0, 0, channel), sum);
  }
}

}  // namespace flashvar::causal_conv1d
