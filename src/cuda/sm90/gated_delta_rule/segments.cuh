// Pass 1 of segments (gated_delta_rule/segments.h), with the warpgroups of fwd.cuh. A transition is
// the chain of a state that starts as the identity, with V = 0.
#pragma once
#include <cstdint>

#include "sm90/gated_delta_rule/fwd.cuh"

namespace flashvar::sm90::gated_delta_rule {

// Grid, on one axis: boundaries x heads x column tiles, those of V followed by those of the
// transition.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    segment_kernel(const __grid_constant__ FwdArgs args) {
  constexpr int kDim = Config::kDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  FwdSmem<Config> const smem{smem_address(shared)};
  if (threadIdx.x == 0) smem.init();
  // Also in blocks without work: the next grid waits for this grid only, so this one must not be
  // complete before the preceding one is.
  ptx::griddepcontrol_wait();
  const FwdProblem& problem = args.problem;
  InnerWork const work(problem, args.segments, args.column_tiles, Config::kColumns);
  if (!work.exists) return;
  // Tiles of V that are never loaded must be zeros.
  LoadedBlocks<Config> const blocks(problem, work.values(problem));
  if (!blocks.all()) zero_shared(smem.base, Config::kState);
  __syncthreads();  // mbarriers are initialised, column blocks that are never loaded are zeroed
  uint32_t const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // warp-uniform
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    FwdLoads<Config> const loads{args, work, ClippedRows(problem, work), blocks};
    if (threadIdx.x < 32 && ptx::elect_one()) load_for_state(loads, smem);
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

}  // namespace flashvar::sm90::gated_delta_rule
