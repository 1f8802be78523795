// Launches both chains of the backward, with wgmma.
#pragma once
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
  template <int kBlocks>
  using States = StatesChain<Target, Dtype, kDim, kBlocks>;
  template <int kBlocks>
  using Reverse = ReverseChain<Target, Dtype, kDim, kBlocks>;
  // With one block per SM, a block asks for all of the shared memory, so that no other block shares
  // its SM.
  template <int kBlocks>
  static constexpr int kSharedMemory =
      kBlocks == 1 ? Target::kSharedMemory
                   : (States<kBlocks>::kSharedMemory > Reverse<kBlocks>::kSharedMemory
                          ? States<kBlocks>::kSharedMemory
                          : Reverse<kBlocks>::kSharedMemory);

  static constexpr KernelFactsList<2> facts(const char* row) {
    KernelFactsMaker const maker{row, kFamily, "every call"};
    return {{maker.make("chains_kernel", kChainThreads, kSharedMemory<2>, kChunk, kChainColumns),
             maker.make("chains_kernel, few heads", kChainThreads, kSharedMemory<1>, kChunk,
                        kChainColumns)}};
  }

  static cudaError_t launch(const BwdProblem& problem, const GradWorkspace& workspace, int device,
                            cudaStream_t stream) {
    int multiprocessors = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    ChainArgs args{};
    args.problem = problem;
    args.workspace = workspace;
    if (error == cudaSuccess) error = encode_maps(args);
    if (error != cudaSuccess) return error;
    int64_t const blocks = 2 * problem.sequences * problem.heads * workspace.tiles;
    return blocks <= multiprocessors ? launch_blocks<1>(args, blocks, device, stream)
                                     : launch_blocks<2>(args, blocks, device, stream);
  }

 private:
  static cudaError_t encode_maps(ChainArgs& args) {
    const BwdProblem& problem = args.problem;
    ChunkMaps<Dtype> const maps{problem};
    cudaError_t error = maps.keys({{args.q, problem.q}, {args.k, problem.k}});
    if (error == cudaSuccess) {
      error = maps.values({{args.v, problem.v}, {args.grad_out, problem.grad_out}});
    }
    return error;
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
