// The filter of a channel, and its activation.
#pragma once
#include <cstdint>

#include "causal_conv1d/problem.h"
#include "causal_conv1d/tensors.cuh"
#include "causal_conv1d/tiles.h"
#include "core/math.cuh"

namespace flashvar::causal_conv1d {

__device__ __forceinline__ float weight(const Problem& problem, int64_t channel, int tap) {
  return load(problem.weight, offset(problem.weight, 0, channel, tap));
}

__device__ __forceinline__ float bias(const Problem& problem, int64_t channel) {
  return problem.bias.data == nullptr ? 0.f
                                      : load(problem.bias, offset(problem.bias, 0, 0, channel));
}

// The filters of channels, one behind the other in each array.
template <int kWidth, int kChannels>
struct Filters {
  float taps[kWidth][kChannels];
  float bias[kChannels];
};

// Those of a block's channels, read by all of its threads.
template <int kWidth, int kChannels>
struct alignas(16) SharedFilters : Filters<kWidth, kChannels> {
  // From the channel `first` on. All threads call it.
  __device__ __forceinline__ void fill(const Problem& problem, int64_t first) {
    for (int i = threadIdx.x; i < kWidth * kChannels; i += kThreads) {
      int const channel = i / kWidth, tap = i % kWidth;
      bool const exists = first + channel < problem.dim;
      this->taps[tap][channel] = exists ? weight(problem, first + channel, tap) : 0.f;
    }
    for (int i = threadIdx.x; i < kChannels; i += kThreads) {
      this->bias[i] = first + i < problem.dim ? causal_conv1d::bias(problem, first + i) : 0.f;
    }
    __syncthreads();  // the filters are there
  }

  template <int kElements>
  __device__ __forceinline__ void copy(int first, Filters<kWidth, kElements>& to) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) to.taps[j][e] = this->taps[j][first + e];
      to.bias[e] = this->bias[first + e];
    }
  }
};

__device__ __forceinline__ float activated(float z, bool silu) {
  return silu ? z * sigmoid_approx(z) : z;
}

// The gradient of z, of that of its activation.
__device__ __forceinline__ float grad_activated(float grad, float z, bool silu) {
  if (!silu) return grad;
  float const gate = sigmoid_approx(z);
  return grad * (gate * fmaf(z, 1.f - gate, 1.f));
}

}  // namespace flashvar::causal_conv1d
