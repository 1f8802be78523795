// Final states of the forward, and gradients of initial states: few elements, one thread for each.
#pragma once
#include <cstdint>

#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/sequences.cuh"
#include "causal_conv1d/tiles.h"

namespace flashvar::causal_conv1d {

// One element of states [sequences, dim, columns].
struct StateElement {
  int64_t index, channel;
  int32_t column;

  __device__ __forceinline__ StateElement(const Problem& problem, int64_t number, int32_t columns) {
    int64_t const beyond = number / columns;
    column = static_cast<int32_t>(number - beyond * columns);
    index = beyond / problem.dim;
    channel = beyond - index * problem.dim;
  }

  __device__ __forceinline__ int64_t offset_in(const Tensor& states) const {
    return offset(states, index, channel, column);
  }
};

// Writes final states. `block`: index among the blocks that do.
__device__ __forceinline__ void write_final(const FwdProblem& problem, int64_t block) {
  int64_t const number = block * kThreads + threadIdx.x;
  if (number >= problem.final_elements()) return;
  StateElement const element(problem, number, problem.final_columns);
  Sequence const sequence = sequence_at(problem, element.index);
  int64_t const at = sequence.end - sequence.begin - problem.final_columns + element.column;
  store(problem.final_state, element.offset_in(problem.final_state),
        token(problem, sequence, element.channel, at));
}

// Gradient of the activation's input, at a token of a sequence.
__device__ __forceinline__ float grad_convolved(const BwdProblem& problem, const Sequence& sequence,
                                                int64_t channel, int64_t at) {
  float z = bias(problem, channel);
  for (int j = 0; j < problem.width; ++j) {
    z = fmaf(weight(problem, channel, j),
             token(problem, sequence, channel, at + j - (problem.width - 1)), z);
  }
  float const grad =
      load(problem.grad_y, offset(problem.grad_y, sequence.batch, sequence.begin + at, channel));
  return grad_activated(grad, z, problem.silu);
}

// Writes gradients of initial states. `block`: index among the blocks that do.
__device__ __forceinline__ void write_grad_state(const BwdProblem& problem, int64_t block) {
  int64_t const number = block * kThreads + threadIdx.x;
  if (number >= problem.state_elements()) return;
  StateElement const element(problem, number, problem.columns);
  Sequence const sequence = sequence_at(problem, element.index);
  int64_t const at = element.column - problem.columns;  // negative
  int64_t const length = sequence.end - sequence.begin;
  float grad = 0.f;
  for (int64_t i = -at; i < problem.width && at + i < length; ++i) {
    grad = fmaf(weight(problem, element.channel, problem.width - 1 - static_cast<int>(i)),
                grad_convolved(problem, sequence, element.channel, at + i), grad);
  }
  int64_t const column = at - length + problem.final_columns;
  if (problem.grad_final.data != nullptr && column >= 0) {
    grad += load(problem.grad_final,
                 offset(problem.grad_final, element.index, element.channel, column));
  }
  store(problem.grad_state, element.offset_in(problem.grad_state), grad);
}

}  // namespace flashvar::causal_conv1d
