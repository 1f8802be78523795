// The filter of a channel, and its activation.
#pragma once
#include <cstdint>

#include "causal_conv1d/problem.h"
#include "causal_conv1d/tensors.cuh"
#include "causal_conv1d/tiles.h"
#include "core/ceil_div.h"
#include "core/math.cuh"

namespace flashvar::causal_conv1d {

__device__ __forceinline__ float weight(const Problem& problem, int64_t channel, int tap) {
  return load(problem.weight, offset(problem.weight, 0, channel, tap));
}

__device__ __forceinline__ float bias(const Problem& problem, int64_t channel) {
  return problem.bias.data == nullptr ? 0.f
                                      : load(problem.bias, offset(problem.bias, 0, 0, channel));
}

// The filter of one channel as it is in memory; zeros if there is no such channel. Nothing waits
// for the loads before the conversion.
template <int kWidth>
struct FilterBits {
  uint32_t taps[kWidth] = {}, bias = 0;

  __device__ __forceinline__ FilterBits(const Problem& problem, int64_t channel, bool exists) {
    if (!exists) return;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      taps[j] = load_bits(problem.weight, offset(problem.weight, 0, channel, j));
    }
    if (problem.bias.data != nullptr) {
      bias = load_bits(problem.bias, offset(problem.bias, 0, 0, channel));
    }
  }
};

// The filter (weights and bias) of one channel.
template <int kWidth>
struct ChannelFilter {
  static constexpr int kPast = kWidth - 1;
  float taps[kWidth];
  float bias;

  __device__ __forceinline__ ChannelFilter(const Problem& problem, const FilterBits<kWidth>& bits) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) taps[j] = value_of(problem.weight, bits.taps[j]);
    bias = value_of(problem.bias, bits.bias);
  }

  // The convolution's result for a token, before the activation.
  __device__ __forceinline__ float convolved(const float* past, float newest) const {
    float z = bias;
#pragma unroll
    for (int j = 0; j < kPast; ++j) z = fmaf(taps[j], past[j], z);
    return fmaf(taps[kPast], newest, z);
  }
};

// The filters of kChannels channels: arrays indexed by channel.
template <int kWidth, int kChannels>
struct Filters {
  float taps[kWidth][kChannels];
  float bias[kChannels];
};

// The filters of a block's channels in shared memory.
template <int kWidth, int kChannels>
struct alignas(16) SharedFilters : Filters<kWidth, kChannels> {
  // Loads the filters from channel `first` on. All loads are issued before the first is waited for.
  // Called by all threads.
  __device__ __forceinline__ void fill(const Problem& problem, int64_t first) {
    constexpr int kEntries = (kWidth + 1) * kChannels, kEach = ceil_div(kEntries, kThreads);
    uint32_t bits[kEach] = {};
    auto each = [&](auto f) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        int const entry = i * kThreads + static_cast<int>(threadIdx.x);
        bool const is_tap = entry < kWidth * kChannels;
        int const channel = is_tap ? entry / kWidth : entry - kWidth * kChannels;
        if (entry < kEntries) f(i, is_tap, channel, entry % kWidth);
      }
    };
    each([&](int i, bool is_tap, int channel, int tap) {
      if (first + channel >= problem.dim) return;
      const Tensor& tensor = is_tap ? problem.weight : problem.bias;
      if (tensor.data == nullptr) return;
      bits[i] = load_bits(
          tensor, offset(tensor, 0, is_tap ? first + channel : 0, is_tap ? tap : first + channel));
    });
    each([&](int i, bool is_tap, int channel, int tap) {
      float& to = is_tap ? this->taps[tap][channel] : this->bias[channel];
      to = value_of(is_tap ? problem.weight : problem.bias, bits[i]);
    });
    __syncthreads();  // all threads have written their part of the filters
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

// Applies the activation to all elements at once, so that their special-function instructions
// overlap.
template <int kElements>
__device__ __forceinline__ void activate(float (&values)[kElements], bool silu) {
  if (!silu) return;
#pragma unroll
  for (int e = 0; e < kElements; ++e) values[e] = activated(values[e], true);
}

// Gradient of z, given the gradient of its activation.
__device__ __forceinline__ float grad_activated(float grad, float z, bool silu) {
  if (!silu) return grad;
  float const gate = sigmoid_approx(z);
  return grad * (gate * fmaf(z, 1.f - gate, 1.f));
}

}  // namespace flashvar::causal_conv1d
