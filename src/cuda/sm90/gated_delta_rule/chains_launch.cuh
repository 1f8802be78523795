// Launches both chains of the backward, with wgmma.
#pragma once
#include <cstdint>

#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "sm80/gated_delta_rule/prepare_launch.cuh"
#include "sm90/gated_delta_rule/chunk_maps.h"
#include "sm90/gated_delta_rule/grad_chains.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype, int kDim>
struct ChainsLaunch {
  static constexpr char kFamily[] = "wgmma";
  using States = StatesChain<Target, Dtype, kDim>;
  using Reverse = ReverseChain<Target, Dtype, kDim>;
  static constexpr int kSharedMemory = States::kSharedMemory > Reverse::kSharedMemory
                                           ? States::kSharedMemory
                                           : Reverse::kSharedMemory;

  static constexpr KernelFactsList<1> facts(const char* row) {
    KernelFactsMaker const maker{row, kFamily, "every call"};
    return {{maker.make("chains_kernel", kChainThreads, kSharedMemory, kChunk, kChainColumns)}};
  }

  static cudaError_t launch(const BwdProblem& problem, const GradWorkspace& workspace, int device,
                            cudaStream_t stream) {
    ChainArgs args{};
    args.problem = problem;
    args.workspace = workspace;
    ChunkMaps<Dtype> const maps{problem};
    cudaError_t error = maps.keys({{args.q, problem.q}, {args.k, problem.k}});
    if (error == cudaSuccess) {
      error = maps.values({{args.v, problem.v}, {args.grad_out, problem.grad_out}});
    }
    if (error != cudaSuccess) return error;
    int64_t const chains = problem.sequences * problem.heads * workspace.tiles;
    LaunchShape shape{2 * chains, kChainThreads, kSharedMemory};
    // PDL: blocks may start while prepare, which is not launched without records, writes the last
    // ones.
    shape.programmatic = sm80::gated_delta_rule::record_count(problem) > 0;
    return launch_kernel<chains_kernel<States, Reverse>>(args, shape, device, stream);
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
