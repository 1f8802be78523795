// The second kernel of the backward: both chains, in blocks of their own. They are independent.
// Where sequences are divided, the three passes over segments (grad_segments.h) replace it.
#pragma once
#include <cstdint>

#include "gated_delta_rule/large_dim.h"
#include "gated_delta_rule/segment_scan.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/warp_uniform.cuh"
#include "sm90/gated_delta_rule/grad_reverse.cuh"
#include "sm90/gated_delta_rule/grad_states.cuh"

namespace flashvar::sm90::gated_delta_rule {

struct GradScanArgs {
  ScanArgs states, grads;
  bool by_sequences;  // the grid's rows are sequences
};

// Whether warpgroups share registers out (setmaxnreg). Above head dim 128 a block has all of an
// SM's, and each thread as many as it can have.
template <class Chain>
constexpr bool kSplitsRegisters = !kLargeDim<Chain::kDim>;

// Goes through the chunks of `work`. `columns`: those from its first one to the last of V, or of
// the transition, for which V is 0.
template <class Chain>
__device__ __forceinline__ void run_chain(const ChainArgs& args,
                                          const typename Chain::Segment& work, int32_t columns,
                                          bool is_transition, unsigned char* shared) {
  // Warpgroups without columns exit.
  uint32_t const warpgroups =
      Chain::kWarpgroups == 1 ? 1 : min(Chain::kWarpgroups, col_blocks_of(columns));
  Chain const chain{ptx::smem_address(shared), warpgroups};
  if (threadIdx.x == 0) chain.init();
  GradLoads const loads(args, work, is_transition ? 0 : static_cast<int32_t>(warpgroups));
  if (loads.keys < Chain::kColBlocks || is_transition) zero_shared(chain.base, Chain::kVectors);
  __syncthreads();  // mbarriers are initialized, column blocks that are never loaded are zeroed
  uint32_t const warpgroup = ptx::warp_uniform(threadIdx.x / kStateThreads);
  if (warpgroup < warpgroups) {
    if constexpr (kSplitsRegisters<Chain>) {
      ptx::setmaxnreg_inc<kStateRegisters<Chain::kExtent>>();
    }
    typename Chain::Segment mine = work;
    mine.column += static_cast<int32_t>(warpgroup) * kChainColumns;
    chain.run(args, mine, warpgroup);
  } else if (warpgroup == Chain::kWarpgroups) {
    if constexpr (kSplitsRegisters<Chain>) ptx::setmaxnreg_dec<kLoadRegisters>();
    if (threadIdx.x < Chain::kWarpgroups * kStateThreads + 32 && ptx::elect_one()) {
      if constexpr (Chain::kExtent != Extent::kSequence) {
        ptx::griddepcontrol_wait();  // the preceding grid is complete, and prepare with it
      }
      chain.load(loads);
    }
  }
}

// The same for all columns of V from the first of `work` on.
template <class Chain>
__device__ __forceinline__ void run_chain(const ChainArgs& args, const SegmentWork& work,
                                          unsigned char* shared) {
  run_chain<Chain>(args, work, args.problem.head_dim_v - work.column, false, shared);
}

// The same in grids that have surplus blocks. These wait, too: see griddepcontrol_wait().
template <class Chain>
__device__ __forceinline__ void run_if_exists(const ChainArgs& args, const SegmentWork& work,
                                              unsigned char* shared) {
  if (work.exists) {
    run_chain<Chain>(args, work, shared);
  } else {
    ptx::griddepcontrol_wait();
  }
}

// Grid, on one axis: 2 x sequences x heads x column tiles of V. The reverse chains take longer and
// come first.
template <class States, class Reverse>
__global__ void __launch_bounds__(kChainThreads<Extent::kSequence>,
                                  kSplitsRegisters<States> ? 2 : 1)
    chains_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ptx::griddepcontrol_launch_dependents();  // PDL: rows_kernel waits for this grid's results
  uint32_t const chains = gridDim.x / 2;
  bool const reverse = blockIdx.x < chains;
  SegmentWork const work =
      SegmentWork::first_segment(args.problem, {0}, args.workspace.tiles, kChainColumns,
                                 reverse ? blockIdx.x : blockIdx.x - chains);
  if (reverse) {
    run_chain<Reverse>(args, work, shared);
  } else {
    run_chain<States>(args, work, shared);
  }
}

// Pass 1 of segments. Grid, on one axis: sequences x heads x column tiles of V, for the reverse
// chains of last segments; boundaries x heads x tiles of kColumns128 columns of V, for those of
// inner segments; then for the chains of states, where the inner segments' tiles are those of V,
// followed by those of the transitions. A block of a boundary takes the segment that ends there,
// and exits at once if that is not an inner segment.
template <class States, class Reverse, class InnerStates, class InnerReverse>
__global__ void __launch_bounds__(kChainThreads<Extent::kSegment>, 1)
    chain_segments_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BwdProblem& problem = args.problem;
  const Segments& segments = args.grad_segments.segments;
  uint32_t const ends = problem.sequences * problem.heads;
  uint32_t const inner = args.grad_segments.boundaries * problem.heads;
  uint32_t const tiles = args.workspace.tiles, tiles_128 = args.value_tiles_128;
  uint32_t block = blockIdx.x;
  auto const is_one_of = [&](uint32_t blocks) {
    bool const found = block < blocks;
    if (!found) block -= blocks;
    return found;
  };
  if (is_one_of(ends * tiles)) {
    auto const work = SegmentWork::last_segment(problem, segments, tiles, kChainColumns, block);
    run_chain<Reverse>(args, work, shared);
  } else if (is_one_of(inner * tiles_128)) {
    Pass1Work const work(problem, segments, tiles_128, kColumns128, false, block);
    if (work.exists) run_chain<InnerReverse>(args, work, shared);
  } else if (is_one_of(ends * tiles_128)) {
    auto const work = SegmentWork::first_segment(problem, segments, tiles_128, kColumns128, block);
    run_chain<States>(args, work, shared);
  } else {
    Pass1Work const work(problem, segments, tiles_128 + args.key_tiles_128, kColumns128, false,
                         block);
    if (!work.exists) return;
    int32_t const end = work.is_transition ? problem.head_dim : problem.head_dim_v;
    run_chain<InnerStates>(args, work, end - work.column, work.is_transition, shared);
  }
}

// Pass 3 of segments. Grid, on one axis: boundaries x heads x column tiles of V, for the reverse
// chains of the segments that end at a boundary; boundaries x heads x tiles of kColumns128 columns,
// for the other chains of those that start at one.
template <class States, class Reverse>
__global__ void __launch_bounds__(kChainThreads<Extent::kSegment>, 1)
    last_chains_kernel(const __grid_constant__ ChainArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ptx::griddepcontrol_launch_dependents();  // PDL: rows_kernel waits for this grid's results
  const BwdProblem& problem = args.problem;
  const Segments& segments = args.grad_segments.segments;
  uint32_t const tiles = args.workspace.tiles;
  uint32_t const reverse = args.grad_segments.boundaries * problem.heads * tiles;
  if (blockIdx.x < reverse) {
    auto const work = SegmentWork::ending_at_boundary(problem, segments, tiles, kChainColumns);
    run_if_exists<Reverse>(args, work, shared);
  } else {
    auto const work = SegmentWork::starting_at_boundary(problem, segments, args.value_tiles_128,
                                                        kColumns128, blockIdx.x - reverse);
    run_if_exists<States>(args, work, shared);
  }
}

// Pass 2. Grid: 2 x rows x heads x column tiles of V; the second half is of gradients. Rows are
// sequences, or boundaries where there are fewer. Two blocks share an SM.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 2)
    chain_scan_kernel(const __grid_constant__ GradScanArgs args) {
  __shared__ ScanState<Config> state;
  __shared__ ScanSums<Config> sums;
  // Pass 1 is complete. Blocks without work wait, too: see griddepcontrol_wait().
  ptx::griddepcontrol_wait();
  uint32_t const scans = gridDim.x / 2;
  bool const reverse = blockIdx.x >= scans;
  uint32_t const block = reverse ? blockIdx.x - scans : blockIdx.x;
  const ScanArgs& scan = reverse ? args.grads : args.states;
  auto work = args.by_sequences
                  ? SegmentWork::first_segment(scan.problem, scan.segments, scan.column_tiles,
                                               Config::kColumns, block)
                  : SegmentWork::ending_at_boundary(scan.problem, scan.segments, scan.column_tiles,
                                                    Config::kColumns, block);
  work.exists = work.after >= 0;
  scan_boundaries<Config>(scan, work, reverse, state, sums);
}

}  // namespace flashvar::sm90::gated_delta_rule
