// The gates of tokens, from what the caller gives.
#pragma once
#include <cstdint>

#include "core/dtype.cuh"
#include "core/math.cuh"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/problem.h"

namespace flashvar::gated_delta_rule {

// e^-104 is 0 in fp32: a lower gate decays no more, and differences of sums stay finite.
inline constexpr float kLowestGate = -104.f;

__device__ __forceinline__ float load(const Gate& gate, int64_t index) {
  if (gate.dtype == dtype::fp32::kAbi) return static_cast<const float*>(gate.data)[index];
  uint16_t const word = static_cast<const uint16_t*>(gate.data)[index];
  return gate.dtype == dtype::bf16::kAbi ? dtype::bf16::unpack(word) : dtype::fp16::unpack(word);
}

// log(1 + exp(x)); x itself where they are equal in fp32.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// Where a gate's values of a chunk begin: of a batch entry, a row and a head.
struct GatePlace {
  int64_t batch, row, head;

  __device__ __forceinline__ int64_t index(const Gate& gate) const {
    return batch * gate.batch_stride + row * gate.seq_stride + head * gate.head_stride;
  }
};

// The logarithm of a token's decay, natural; NaN where an input is.
__device__ __forceinline__ float decay_log(const Problem& problem, const GatePlace& place) {
  if (problem.g.data == nullptr) return 0.f;
  float g = load(problem.g, place.index(problem.g));
  if (problem.a_log.data != nullptr) {
    if (problem.dt_bias.data != nullptr) g += load(problem.dt_bias, place.index(problem.dt_bias));
    g = -expf(load(problem.a_log, place.index(problem.a_log))) * softplus(g);
  }
  return g < kLowestGate ? kLowestGate : g;
}

__device__ __forceinline__ float beta_of(const Problem& problem, const GatePlace& place) {
  float beta = load(problem.beta, place.index(problem.beta));
  if (problem.beta_sigmoid) beta = 1.f / (1.f + expf(-beta));
  return problem.beta_scale * beta;
}

// The sum of the values of the warp's lanes below this one.
__device__ __forceinline__ float sum_before(float value) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  float sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    float const before = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += before;
  }
  float const before = __shfl_up_sync(0xffffffffu, sum, 1);
  return lane == 0 ? 0.f : before;
}

}  // namespace flashvar::gated_delta_rule
