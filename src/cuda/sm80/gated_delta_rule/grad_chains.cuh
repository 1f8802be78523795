// The second and the third kernel of the backward: both chains. Neither waits for the other: from
// 9.0 on they run side by side.
#pragma once
#include <cstdint>

#include "ptx/grid_dependency.cuh"
#include "sm80/gated_delta_rule/grad_reverse.cuh"
#include "sm80/gated_delta_rule/grad_states.cuh"

namespace flashvar::sm80::gated_delta_rule {

struct ChainArgs {
  BwdProblem problem;
  GradWorkspace workspace;
};

// The grid of both: sequences times heads times tiles of columns of V, on one axis.
template <class Config>
__global__ void __launch_bounds__(kChainThreads, 1)
    reverse_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ptx::griddepcontrol_launch_dependents();
  Work const work(args.problem, args.workspace.tiles, kChainColumns);
  find_grad_states<Config>(args.problem, args.workspace, work, shared);
}

template <class Config>
__global__ void __launch_bounds__(kChainThreads, 1)
    states_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Work const work(args.problem, args.workspace.tiles, kChainColumns);
  find_states<Config>(args.problem, args.workspace, work, shared);
  // What follows in the stream waits for this kernel alone, so it ends after the other.
  ptx::griddepcontrol_wait();
}

}  // namespace flashvar::sm80::gated_delta_rule
