// Pass 1 of segments (gated_delta_rule/segments.h), with the warpgroups of fwd.cuh. First segments
// are computed as in the forward; of inner segments only the state, without the output, and the
// transition: the chain of a state that starts as the identity, with V = 0.
#pragma once
#include <cstdint>

#include "ptx/warp_uniform.cuh"
#include "sm90/gated_delta_rule/fwd.cuh"

namespace flashvar::sm90::gated_delta_rule {

// Computes the state, or the transition, of an inner segment. Called by all threads of the block.
template <class Config>
__device__ __forceinline__ void run_inner_segment(const FwdArgs& args, const Pass1Work& work,
                                                  unsigned char* shared) {
  constexpr int kDim = Config::kDim;
  FwdSmem<Config> const smem{ptx::smem_address(shared)};
  if (threadIdx.x == 0) smem.init();
  const FwdProblem& problem = args.problem;
  // Tiles of V that are never loaded must be zeros.
  LoadedBlocks<Config> const blocks(problem, work.values(problem));
  if (!blocks.all()) zero_shared(smem.base, Config::kState);
  __syncthreads();  // mbarriers are initialized, column blocks that are never loaded are zeroed
  uint32_t const warpgroup = ptx::warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kLoadRegisters>();
    FwdLoads<Config> const loads{args, work, ClippedRows(problem, work), blocks};
    if (threadIdx.x < 32 && ptx::elect_one()) {
      ptx::griddepcontrol_wait();  // prepare has written the records
      load_for_state(loads, smem);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kStateRegisters>();
    int const mine = static_cast<int>(warpgroup) - 1;
    int32_t const column = work.column + 64 * mine;
    float state[kDim / 2];
    load_first_state<kDim>(problem, work, column, state);
    advance_state(args, smem, work, mine, column, state);
    store_last_state<kDim>(problem, args.between, work, column, state);
  }
}

// Grid, on one axis: sequences x heads x column tiles of V, for the output of first segments; then
// boundaries x heads x column tiles, those of V followed by those of the transition, for inner
// segments. Blocks of inner segments without work exit without griddepcontrol.wait: those of first
// segments wait, so this grid completes after the preceding one.
template <class First, class Inner>
__global__ void __launch_bounds__(First::kThreads, 1)
    segment_kernel(const __grid_constant__ FwdArgs args) {
  static_assert(First::kThreads == Inner::kThreads);
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdProblem& problem = args.problem;
  if (blockIdx.x < args.first_blocks) {
    run_segment<First>(
        args,
        SegmentWork::first_segment(problem, args.segments, args.column_tiles, First::kColumns),
        shared);
  } else {
    Pass1Work const work(problem, args.segments, args.inner_tiles, Inner::kColumns, false,
                         blockIdx.x - args.first_blocks);
    if (work.exists) run_inner_segment<Inner>(args, work, shared);
  }
}

}  // namespace flashvar::sm90::gated_delta_rule
