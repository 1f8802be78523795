// The second and the third kernel of the backward, one for each chain. They are independent of each
// other; from 9.0 on PDL lets them run concurrently.
#pragma once
#include <cstdint>

#include "gated_delta_rule/large_dim.h"
#include "ptx/grid_dependency.cuh"
#include "sm80/gated_delta_rule/grad_reverse_large_dim.cuh"
#include "sm80/gated_delta_rule/grad_states.cuh"

namespace flashvar::sm80::gated_delta_rule {

struct ChainArgs {
  BwdProblem problem;
  GradWorkspace workspace;
};

// Grid of both, on one axis: sequences x heads x column tiles of V.
template <class Config>
__global__ void __launch_bounds__(kChainThreads, 1)
    reverse_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ptx::griddepcontrol_launch_dependents();
  Work const work(args.problem, args.workspace.tiles, kChainColumns);
  if constexpr (kLargeDim<Config::kDim>) {
    compute_grad_states_large_dim<Config>(args.problem, args.workspace, work, shared);
  } else {
    compute_grad_states<Config>(args.problem, args.workspace, work, shared);
  }
}

template <class Config>
__global__ void __launch_bounds__(kChainThreads, 1)
    states_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Work const work(args.problem, args.workspace.tiles, kChainColumns);
  compute_states<Config>(args.problem, args.workspace, work, shared);
  // The next kernel waits for this one only, so this one must not be complete before the other is.
  ptx::griddepcontrol_wait();
}

}  // namespace flashvar::sm80::gated_delta_rule
