// Computes the gates of tokens from the caller's tensors.
#pragma once
#include <cstdint>

#include "core/any_dtype.cuh"
#include "core/math.cuh"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/problem.h"

namespace flashvar::gated_delta_rule {

// Gates are clamped to at least this: e^-104 is 0 in fp32, and sums of gates and their differences
// stay finite.
inline constexpr float kLowestGate = -104.f;

// log(1 + exp(x)); x itself where they are equal in fp32.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// Coordinates in gate tensors: batch index, row (of a token, or of a chunk's first), and head.
struct GateCoordinate {
  int64_t batch, row, head;

  // `gate`: a Gate or a GradGate.
  template <class View>
  __device__ __forceinline__ int64_t index(const View& gate) const {
    return batch * gate.batch_stride + row * gate.seq_stride + head * gate.head_stride;
  }
};

// The unconverted inputs of a token's gate and beta, for one head.
struct GateBits {
  uint32_t g, a_log, dt_bias, beta;

  GateBits() = default;
  __device__ __forceinline__ GateBits(const Problem& problem, const GateCoordinate& coordinate)
      : g(bits(problem.g, coordinate)),
        a_log(bits(problem.a_log, coordinate)),
        dt_bias(bits(problem.dt_bias, coordinate)),
        beta(bits(problem.beta, coordinate)) {}

  // Natural logarithm of the token's decay; NaN if an input is NaN.
  __device__ __forceinline__ float decay_log(const Problem& problem) const {
    if (problem.g.data == nullptr) return 0.f;
    float value = value_of(problem.g, g);
    if (problem.a_log.data != nullptr) {
      if (problem.dt_bias.data != nullptr) value += value_of(problem.dt_bias, dt_bias);
      value = -expf(value_of(problem.a_log, a_log)) * softplus(value);
    }
    return value < kLowestGate ? kLowestGate : value;
  }

  __device__ __forceinline__ float beta_of(const Problem& problem) const {
    float value = value_of(problem.beta, beta);
    if (problem.beta_sigmoid) value = 1.f / (1.f + expf(-value));
    return problem.beta_scale * value;
  }

 private:
  static __device__ __forceinline__ uint32_t bits(const Gate& gate,
                                                  const GateCoordinate& coordinate) {
    return gate.data == nullptr ? 0 : load_bits(gate, coordinate.index(gate));
  }
};

__device__ __forceinline__ float decay_log(const Problem& problem,
                                           const GateCoordinate& coordinate) {
  return GateBits(problem, coordinate).decay_log(problem);
}
__device__ __forceinline__ float beta_of(const Problem& problem, const GateCoordinate& coordinate) {
  return GateBits(problem, coordinate).beta_of(problem);
}

// Exclusive prefix sum over the lanes of the warp.
__device__ __forceinline__ float exclusive_prefix_sum(float value) {
  int const lane_id = static_cast<int>(threadIdx.x) % 32;
  float sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    float const before = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane_id >= step) sum += before;
  }
  float const before = __shfl_up_sync(0xffffffffu, sum, 1);
  return lane_id == 0 ? 0.f : before;
}

}  // namespace flashvar::gated_delta_rule
