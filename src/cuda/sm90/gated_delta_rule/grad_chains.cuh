// The second kernel of the backward: both chains, in blocks of their own. They are independent.
// With segments (grad_segments.h) it is the fourth, after passes 1 and 2.
#pragma once
#include <cstdint>

#include "gated_delta_rule/segment_scan.cuh"
#include "ptx/grid_dependency.cuh"
#include "sm90/gated_delta_rule/grad_reverse.cuh"
#include "sm90/gated_delta_rule/grad_states.cuh"

namespace flashvar::sm90::gated_delta_rule {

struct GradScanArgs {
  ScanArgs states, grads;
};

// Goes through a segment. `values`: column blocks of V to load.
template <class Chain, class Segment>
__device__ __forceinline__ void run_chain(const ChainArgs& args, const Segment& work,
                                          int32_t values, unsigned char* shared) {
  if (!work.exists) return;
  Chain const chain{ptx::smem_address(shared)};
  if (threadIdx.x == 0) chain.init();
  GradLoads const loads(args, work, values);
  if (loads.keys < Chain::kColBlocks || values == 0) zero_shared(chain.base, Chain::kVectors);
  __syncthreads();  // mbarriers are initialised, column blocks that are never loaded are zeroed
  // The shuffle tells the compiler that the index is warp-uniform, so that descriptors are in
  // uniform registers.
  if (__shfl_sync(0xffffffffu, threadIdx.x / kStateThreads, 0) == 0) {
    ptx::setmaxnreg_inc<kStateRegisters>();
    chain.follow(args, work);
  } else {
    ptx::setmaxnreg_dec<kLoadRegisters>();
    if (threadIdx.x < kStateThreads + 32 && ptx::elect_one()) chain.load(loads);
  }
}

// Grid, on one axis: 2 x segments x heads x column tiles of V. The reverse chains take longer and
// come first.
template <class States, class Reverse>
__global__ void __launch_bounds__(kChainThreads, 2)
    chains_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ptx::griddepcontrol_launch_dependents();  // PDL: rows_kernel waits for this grid's results
  uint32_t const chains = gridDim.x / 2;
  bool const reverse = blockIdx.x < chains;
  SegmentWork const work = SegmentWork::of_segment(
      args.problem, args.of_segments.segments, args.of_segments.boundaries, args.workspace.tiles,
      kChainColumns, reverse ? blockIdx.x : blockIdx.x - chains);
  reverse ? run_chain<Reverse>(args, work, 1, shared) : run_chain<States>(args, work, 1, shared);
}

// Pass 1 of segments. Grid, on one axis: boundaries x heads x column tiles of V, for the reverse
// chains; then boundaries x heads x column tiles, those of V followed by those of the transitions.
template <class States, class Reverse>
__global__ void __launch_bounds__(kChainThreads, 2)
    chain_segments_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BwdProblem& problem = args.problem;
  const Segments& segments = args.of_segments.segments;
  int32_t const tiles = args.workspace.tiles;
  uint32_t const reverse = args.of_segments.boundaries * problem.heads * tiles;
  if (blockIdx.x < reverse) {
    auto const work = SegmentWork::after_boundary(problem, segments, tiles, kChainColumns);
    run_chain<Reverse>(args, work, 1, shared);
  } else {
    int32_t const of_transition = (problem.head_dim + kChainColumns - 1) / kChainColumns;
    InnerWork const work(problem, segments, tiles + of_transition, kChainColumns, true,
                         blockIdx.x - reverse);
    run_chain<States>(args, work, work.is_transition ? 0 : 1, shared);
  }
}

// Pass 2. Grid: 2 x boundaries x heads x column tiles of V; the second half is of gradients.
template <int kDim>
__global__ void __launch_bounds__(ScanConfig<kDim>::kThreads)
    chain_scan_kernel(const __grid_constant__ GradScanArgs args) {
  using States = ScanConfig<kDim>;
  using Grads = ScanConfig<kDim, true>;
  __shared__ ScanState<States> state;
  __shared__ ScanSums<States> sums;
  uint32_t const scans = gridDim.x / 2;
  if (blockIdx.x < scans) {
    scan_boundaries<States>(args.states, blockIdx.x, state, sums);
  } else {
    scan_boundaries<Grads>(args.grads, blockIdx.x - scans, state, sums);
  }
}

}  // namespace flashvar::sm90::gated_delta_rule
