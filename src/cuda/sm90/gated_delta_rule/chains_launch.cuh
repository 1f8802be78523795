// Launches both chains of the backward, with wgmma.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "sm90/gated_delta_rule/chunk_maps.h"
#include "sm90/gated_delta_rule/grad_chain_kernels.cuh"
#include "sm90/gated_delta_rule/grad_reverse_large_dim.cuh"

namespace flashvar::sm90::gated_delta_rule {

// The arguments of both chains, except those of segments and the numbers of tiles of kColumns128
// columns.
template <class Dtype>
cudaError_t make_chain_args(ChainArgs& args, const BwdProblem& problem,
                            const GradWorkspace& workspace) {
  args.problem = problem;
  args.workspace = workspace;
  ChunkMaps<Dtype> const maps{problem};
  cudaError_t const error = maps.keys({{args.q, problem.q}, {args.k, problem.k}});
  return error == cudaSuccess
             ? maps.values({{args.v, problem.v}, {args.grad_out, problem.grad_out}})
             : error;
}

template <class Target, class Dtype, int kDim>
struct ChainsLaunch {
  static constexpr const char* kFamily = "wgmma";
  // Chains of whole sequences. kBlocks: blocks that share an SM.
  template <int kBlocks>
  using States = StatesChain<Target, Dtype, kDim, Extent::kSequence, kBlocks, 1>;
  template <int kBlocks>
  using Reverse = ReverseChain<Target, Dtype, kDim, Extent::kSequence, kBlocks, 1>;
  // Chains of segments. Where chunks' results are written, a reverse chain of 64 columns takes
  // longer than a chain of states of 128 columns.
  using StatesOfSegment = StatesChain<Target, Dtype, kDim, Extent::kSegment, 1, 2>;
  using ReverseOfSegment = ReverseChain<Target, Dtype, kDim, Extent::kSegment, 1, 1>;
  using InnerStates = StatesChain<Target, Dtype, kDim, Extent::kInner, 1, 2>;
  using InnerReverse = ReverseChain<Target, Dtype, kDim, Extent::kInner, 1, 2>;
  using Scan = ScanConfig<kDim, 4>;
  static constexpr int kThreads = kChainThreads<Extent::kSequence>;
  static constexpr int kSegmentThreads = kChainThreads<Extent::kSegment>;
  // With one block per SM, a block asks for all of the shared memory, so that no other block shares
  // its SM.
  template <int kBlocks>
  static constexpr int kSharedMemory =
      kBlocks == 1 ? Target::kSharedMemory
                   : std::max(States<kBlocks>::kSharedMemory, Reverse<kBlocks>::kSharedMemory);
  static constexpr int kLastMemory =
      std::max(StatesOfSegment::kSharedMemory, ReverseOfSegment::kSharedMemory);
  static constexpr int kSegmentMemory =
      std::max({kLastMemory, InnerStates::kSharedMemory, InnerReverse::kSharedMemory});

  static constexpr KernelFactsList<5> facts(const char* row) {
    constexpr const char* kSegments = "few heads and long sequences";
    KernelFactsMaker const chain{row, kFamily, "every call"};
    KernelFactsMaker const segment{row, kFamily, kSegments}, scan{row, "simt", kSegments};
    return {
        {chain.make("chains_kernel", kThreads, kSharedMemory<2>, kChunk, kChainColumns),
         chain.make("chains_kernel, few heads", kThreads, kSharedMemory<1>, kChunk, kChainColumns),
         segment.make("chain_segments_kernel", kSegmentThreads, kSegmentMemory, kChunk,
                      kColumns128),
         scan.make("chain_scan_kernel", Scan::kThreads, 0, Scan::kColumns),
         segment.make("last_chains_kernel", kSegmentThreads, kLastMemory, kChunk, kColumns128)}};
  }

  static Segments segments(const BwdProblem& problem) { return choose_segments(problem, kCosts); }

  static cudaError_t launch(const BwdProblem& problem, const GradWorkspace& workspace,
                            const GradSegments& grad_segments, int device, cudaStream_t stream) {
    int multiprocessors = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    ChainArgs args{};
    args.grad_segments = grad_segments;
    args.value_tiles_128 = ceil_div(problem.head_dim_v, kColumns128);
    args.key_tiles_128 = ceil_div(problem.head_dim, kColumns128);
    if (error == cudaSuccess) error = make_chain_args<Dtype>(args, problem, workspace);
    if (error != cudaSuccess) return error;
    if (grad_segments.boundaries > 0) return launch_segments(args, device, stream);
    int64_t const chains = 2 * problem.sequences * problem.heads * workspace.tiles;
    return chains <= multiprocessors ? launch_blocks<1>(args, chains, device, stream)
                                     : launch_blocks<2>(args, chains, device, stream);
  }

 private:
  // In the order of GradChainCosts' members, for an H200, which has 132 SMs. `chunk` and `scan` are
  // measured; the times of segments are estimated from them.
  static constexpr GradChainCosts kCosts{132, {1700, 3000}, 1750, 1850, 2500, 6000};

  // The three passes. Each may start while the preceding kernel's last blocks run (PDL).
  static cudaError_t launch_segments(const ChainArgs& args, int device, cudaStream_t stream) {
    const BwdProblem& problem = args.problem;
    const GradSegments& segments = args.grad_segments;
    int64_t const tiles_64 = args.workspace.tiles, tiles_128 = args.value_tiles_128;
    int64_t const ends = problem.sequences * problem.heads;
    int64_t const inner = int64_t{segments.boundaries} * problem.heads;
    LaunchShape shape{ends * (tiles_64 + tiles_128) + inner * (2 * tiles_128 + args.key_tiles_128),
                      kSegmentThreads, kSegmentMemory, true};
    cudaError_t error = launch_kernel<
        chain_segments_kernel<StatesOfSegment, ReverseOfSegment, InnerStates, InnerReverse>>(
        args, shape, device, stream);
    if (error != cudaSuccess) return error;
    int32_t const scans = ceil_div(problem.head_dim_v, Scan::kColumns);
    GradScanArgs const scan{{problem, segments.segments, segments.between, scans},
                            {problem, segments.segments, segments.grads, scans},
                            problem.sequences <= segments.boundaries};
    shape = {2 * std::min(ends, inner) * scans, Scan::kThreads, 0, true};
    error = launch_kernel<chain_scan_kernel<Scan>>(scan, shape, device, stream);
    if (error != cudaSuccess) return error;
    shape = {inner * (tiles_64 + tiles_128), kSegmentThreads, kLastMemory, true};
    return launch_kernel<last_chains_kernel<StatesOfSegment, ReverseOfSegment>>(args, shape, device,
                                                                                stream);
  }

  template <int kBlocks>
  static cudaError_t launch_blocks(const ChainArgs& args, int64_t blocks, int device,
                                   cudaStream_t stream) {
    // Not programmatic: blocks that share SMs would start two each on the SMs that become free
    // first, and the kernel takes as long as its fullest SM.
    LaunchShape const shape{blocks, kThreads, kSharedMemory<kBlocks>};
    return launch_kernel<chains_kernel<States<kBlocks>, Reverse<kBlocks>>>(args, shape, device,
                                                                           stream);
  }
};

// Head dims above 128: a block per SM, with 64 columns of a chain, and no segments.
template <class Target, class Dtype, int kDim>
struct LargeDimChainsLaunch {
  static constexpr const char* kFamily = "wgmma";
  using States = StatesChain<Target, Dtype, kDim, Extent::kSequence, 1, 1>;
  using Reverse = LargeDimReverseChain<Target, Dtype, kDim>;
  static constexpr int kThreads = kChainThreads<Extent::kSequence>;
  static constexpr int kSharedMemory = std::max(States::kSharedMemory, Reverse::kSharedMemory);

  static constexpr KernelFactsList<1> facts(const char* row) {
    KernelFactsMaker const chain{row, kFamily, "every call"};
    return {{chain.make("chains_kernel", kThreads, kSharedMemory, kChunk, kChainColumns)}};
  }

  static Segments segments(const BwdProblem&) { return {0}; }

  static cudaError_t launch(const BwdProblem& problem, const GradWorkspace& workspace,
                            const GradSegments&, int device, cudaStream_t stream) {
    ChainArgs args{};
    cudaError_t const error = make_chain_args<Dtype>(args, problem, workspace);
    if (error != cudaSuccess) return error;
    LaunchShape const shape{2 * problem.sequences * problem.heads * workspace.tiles, kThreads,
                            kSharedMemory};
    return launch_kernel<chains_kernel<States, Reverse>>(args, shape, device, stream);
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
