// The second kernel of the backward: both chains, in blocks of their own. They are independent.
#pragma once
#include <cstdint>

#include "ptx/grid_dependency.cuh"
#include "sm90/gated_delta_rule/grad_reverse.cuh"
#include "sm90/gated_delta_rule/grad_states.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Chain>
__device__ __forceinline__ void run_chain(const ChainArgs& args, uint32_t block,
                                          unsigned char* shared) {
  Chain const chain{ptx::smem_address(shared)};
  if (threadIdx.x == 0) chain.init();
  Work const work(args.problem, args.workspace.tiles, kChainColumns, block);
  GradLoads const loads(args, work);
  if (loads.keys < Chain::kColBlocks) zero_shared(chain.base, Chain::kVectors);
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

// Grid, on one axis: 2 x sequences x heads x column tiles of V. The reverse chains take longer and
// come first.
template <class States, class Reverse>
__global__ void __launch_bounds__(kChainThreads, 2)
    chains_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ptx::griddepcontrol_launch_dependents();  // PDL: rows_kernel waits for this grid's results
  uint32_t const chains = gridDim.x / 2;
  if (blockIdx.x < chains) {
    run_chain<Reverse>(args, blockIdx.x, shared);
  } else {
    run_chain<States>(args, blockIdx.x - chains, shared);
  }
}

}  // namespace flashvar::sm90::gated_delta_rule
