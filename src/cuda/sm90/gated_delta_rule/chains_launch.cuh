// Launches both chains of the backward, with wgmma.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "sm90/gated_delta_rule/chunk_maps.h"
#include "sm90/gated_delta_rule/grad_chains.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype, int kDim>
struct ChainsLaunch {
  static constexpr char kFamily[] = "wgmma";
  // kBlocks: blocks that share an SM.
  template <int kBlocks, bool kOutput = true>
  using States = StatesChain<Target, Dtype, kDim, kBlocks, kOutput>;
  template <int kBlocks, bool kOutput = true>
  using Reverse = ReverseChain<Target, Dtype, kDim, kBlocks, kOutput>;
  using Scan = ScanConfig<kDim>;
  // With one block per SM, a block asks for all of the shared memory, so that no other block shares
  // its SM.
  template <int kBlocks, bool kOutput = true>
  static constexpr int kSharedMemory =
      kBlocks == 1
          ? Target::kSharedMemory
          : (States<kBlocks, kOutput>::kSharedMemory > Reverse<kBlocks, kOutput>::kSharedMemory
                 ? States<kBlocks, kOutput>::kSharedMemory
                 : Reverse<kBlocks, kOutput>::kSharedMemory);

  static constexpr KernelFactsList<5> facts(const char* row) {
    constexpr const char* kSegments = "few heads and long sequences";
    KernelFactsMaker const chain{row, kFamily, "every call"};
    KernelFactsMaker const segment{row, kFamily, kSegments}, scan{row, "simt", kSegments};
    return {{chain.make("chains_kernel", kChainThreads, kSharedMemory<2>, kChunk, kChainColumns),
             chain.make("chains_kernel, few heads", kChainThreads, kSharedMemory<1>, kChunk,
                        kChainColumns),
             segment.make("chain_segments_kernel", kChainThreads, kSharedMemory<2, false>, kChunk,
                          kChainColumns),
             segment.make("chain_segments_kernel, few heads", kChainThreads,
                          kSharedMemory<1, false>, kChunk, kChainColumns),
             scan.make("chain_scan_kernel", Scan::kThreads, 0, Scan::kColumns)}};
  }

  static Segments segments(const BwdProblem& problem) { return choose_segments(problem, kCosts); }

  static cudaError_t launch(const BwdProblem& problem, const GradWorkspace& workspace,
                            const GradSegments& of_segments, int device, cudaStream_t stream) {
    int multiprocessors = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    ChainArgs args{};
    args.problem = problem;
    args.workspace = workspace;
    args.of_segments = of_segments;
    if (error == cudaSuccess) error = encode_maps(args);
    if (error == cudaSuccess && of_segments.boundaries > 0) {
      error = launch_segments(args, multiprocessors, device, stream);
    }
    if (error != cudaSuccess) return error;
    int64_t const rows = problem.sequences + of_segments.boundaries;
    int64_t const chains = 2 * int64_t{problem.heads} * workspace.tiles;
    return long_segments(problem, of_segments) * chains <= multiprocessors
               ? launch_blocks<1>(args, rows * chains, device, stream)
               : launch_blocks<2>(args, rows * chains, device, stream);
  }

 private:
  // In the order of GradChainCosts' members, for an H200, which has 132 SMs. Times of pass 3 and of
  // the scan are measured; those of pass 1 are without what its chains do not store.
  static constexpr GradChainCosts kCosts{132, {1800, 3000}, {1600, 2600}, 2500, 6000};

  static cudaError_t encode_maps(ChainArgs& args) {
    const BwdProblem& problem = args.problem;
    ChunkMaps<Dtype> const maps{problem};
    cudaError_t error = maps.keys({{args.q, problem.q}, {args.k, problem.k}});
    if (error == cudaSuccess) {
      error = maps.values({{args.v, problem.v}, {args.grad_out, problem.grad_out}});
    }
    return error;
  }

  // Segments that take long. Those of packed sequences, whose lengths are not known here, are
  // counted as if sequences were of one length: the rest of their blocks exit at once or soon.
  static int64_t long_segments(const BwdProblem& problem, const GradSegments& of_segments) {
    int64_t const boundaries = of_segments.boundaries;
    if (problem.rows.offsets == nullptr) return problem.sequences + boundaries;
    return boundaries == 0 ? problem.sequences : std::max(problem.sequences, boundaries + 1);
  }

  // Passes 1 and 2.
  static cudaError_t launch_segments(const ChainArgs& args, int multiprocessors, int device,
                                     cudaStream_t stream) {
    const BwdProblem& problem = args.problem;
    const GradSegments& of = args.of_segments;
    int64_t const chains = int64_t{of.boundaries} * problem.heads;
    int32_t const of_transition = tiles(problem.head_dim, kChainColumns);
    int64_t const blocks = chains * (2 * args.workspace.tiles + of_transition);
    // First segments have no transition: those blocks exit at once, and leave their SMs to others.
    int64_t const sequences = problem.rows.offsets == nullptr ? problem.sequences : 1;
    int64_t const surplus = sequences * problem.heads * of_transition;
    cudaError_t const error = blocks - surplus <= multiprocessors
                                  ? launch_pass<1>(args, blocks, device, stream)
                                  : launch_pass<2>(args, blocks, device, stream);
    if (error != cudaSuccess) return error;
    int32_t const scans = tiles(problem.head_dim_v, Scan::kColumns);
    GradScanArgs const scan{{problem, of.segments, of.between, scans},
                            {problem, of.segments, of.grads, scans}};
    LaunchShape const shape{2 * chains * scans, Scan::kThreads, 0, true};
    return launch_kernel<chain_scan_kernel<kDim>>(scan, shape, device, stream);
  }

  static int32_t tiles(int32_t columns, int32_t size) { return (columns + size - 1) / size; }

  template <int kBlocks>
  static cudaError_t launch_pass(const ChainArgs& args, int64_t blocks, int device,
                                 cudaStream_t stream) {
    LaunchShape const shape{blocks, kChainThreads, kSharedMemory<kBlocks, false>};
    return launch_kernel<chain_segments_kernel<States<kBlocks, false>, Reverse<kBlocks, false>>>(
        args, shape, device, stream);
  }

  template <int kBlocks>
  static cudaError_t launch_blocks(const ChainArgs& args, int64_t blocks, int device,
                                   cudaStream_t stream) {
    // Not programmatic: blocks that share SMs would start two each on the SMs that become free
    // first, and the kernel takes as long as its fullest SM.
    LaunchShape const shape{blocks, kChainThreads, kSharedMemory<kBlocks>};
    return launch_kernel<chains_kernel<States<kBlocks>, Reverse<kBlocks>>>(args, shape, device,
                                                                           stream);
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
