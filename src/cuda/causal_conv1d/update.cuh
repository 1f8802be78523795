// The update, for decoding. A thread has a channel of a sequence with all of its tokens and columns
// of the state; no other thread accesses them.
#pragma once
#include <cstdint>

#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/sequences.cuh"
#include "causal_conv1d/tiles.h"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

// A channel of a sequence and of its state. Column `oldest` of the state holds the oldest token: 0
// unless states are circular.
struct UpdateChannel {
  int64_t batch, channel, slot, oldest;

  // Offset of the state's column `index`, counted from the column of the oldest token.
  __device__ __forceinline__ int64_t column(const UpdateProblem& problem, int64_t index) const {
    int64_t const column = index + oldest;
    return offset(problem.state, slot, channel,
                  column < problem.columns ? column : column % problem.columns);
  }
  // Token `at`, relative to the first new one; negative: of the state.
  __device__ __forceinline__ float token(const UpdateProblem& problem, int64_t at) const {
    if (at >= 0) return load(problem.x, offset(problem.x, batch, at, channel));
    if (at < -problem.columns) return 0.f;
    return load(problem.state, column(problem, problem.columns + at));
  }
};

template <int kWidth, int kBlocksPerSM>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    update_kernel(const __grid_constant__ UpdateProblem args) {
  constexpr int kPast = kWidth - 1;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  int64_t const number = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  UpdateChannel at{};
  at.batch = number / args.dim;
  at.channel = number - at.batch * args.dim;
  if (at.batch >= args.batch) return;
  bool const circular = args.state_positions.data != nullptr;
  at.slot = args.state_indices.data == nullptr ? at.batch : load(args.state_indices, at.batch);
  if (at.slot < 0 || at.slot >= args.sequences) {
    // Result without a state: 0 if the index says that there is none, NaN if the index is invalid.
    float const absent = at.slot < 0 ? 0.f : __int_as_float(0x7fffffff);
    for (int64_t t = 0; t < args.seqlen; ++t) {
      store(args.y, offset(args.y, at.batch, t, at.channel), absent);
    }
    return;
  }
  if (circular) {
    int64_t const position = load(args.state_positions, at.batch) % args.columns;
    at.oldest = position < 0 ? position + args.columns : position;
  }
  float taps[kWidth], past[kPast];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) taps[j] = weight(args, at.channel, j);
#pragma unroll
  for (int k = 0; k < kPast; ++k) past[k] = at.token(args, k - kPast);
  float const of_bias = bias(args, at.channel);

  for (int64_t t = 0; t < args.seqlen; ++t) {
    float const newest = at.token(args, t);
    float z = of_bias;
#pragma unroll
    for (int k = 0; k < kPast; ++k) z = fmaf(taps[k], past[k], z);
    float y = activated(fmaf(taps[kPast], newest, z), args.silu);
    if (args.residual.data != nullptr) {
      y += load(args.residual, offset(args.residual, at.batch, t, at.channel));
    }
    store(args.y, offset(args.y, at.batch, t, at.channel), y);
#pragma unroll
    for (int k = 0; k + 1 < kPast; ++k) past[k] = past[k + 1];
    past[kPast - 1] = newest;
  }

  if (circular) {  // only new tokens are written
    for (int64_t t = max(args.seqlen - args.columns, int64_t{0}); t < args.seqlen; ++t) {
      store(args.state, at.column(args, t), at.token(args, t));
    }
    return;
  }
  // Each column gets the token of a column further right: written from left to right, none is
  // overwritten before it is read.
  for (int64_t column = 0; column < args.columns - kPast; ++column) {
    store(args.state, at.column(args, column), at.token(args, column + args.seqlen - args.columns));
  }
#pragma unroll
  for (int k = 0; k < kPast; ++k) {
    store(args.state, at.column(args, args.columns - kPast + k), past[k]);
  }
}

}  // namespace flashvar::causal_conv1d
