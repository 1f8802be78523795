// Launches both chains of the backward.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "gated_delta_rule/grad_segments.h"
#include "gated_delta_rule/large_dim.h"
#include "sm80/gated_delta_rule/grad_chain_kernels.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype, int kDim>
struct ChainsLaunch {
  static constexpr const char* kFamily = "mma.sync";
  using States = StatesConfig<Target, Dtype, kDim>;
  using Reverse = std::conditional_t<kLargeDim<kDim>, LargeDimReverseConfig<Target, Dtype, kDim>,
                                     ReverseConfig<Target, Dtype, kDim>>;

  static constexpr KernelFactsList<2> facts(const char* row) {
    KernelFactsMaker const maker{row, kFamily, "every call"};
    return {
        {maker.make("reverse_kernel", kChainThreads, Reverse::kSharedMemory, kChunk, kChainColumns),
         maker.make("states_kernel", kChainThreads, States::kSharedMemory, kChunk, kChainColumns)}};
  }

  // Sequences are not divided.
  static Segments segments(const BwdProblem&) { return {0}; }

  static cudaError_t launch(const BwdProblem& problem, const GradWorkspace& workspace,
                            const GradSegments&, int device, cudaStream_t stream) {
    int64_t const chains = problem.sequences * problem.heads * workspace.tiles;
    LaunchShape shape{chains, kChainThreads, Reverse::kSharedMemory};
    ChainArgs const args{problem, workspace};
    cudaError_t const error = launch_kernel<reverse_kernel<Reverse>>(args, shape, device, stream);
    if (error != cudaSuccess) return error;
    shape.shared_memory = States::kSharedMemory;
    shape.programmatic = Target::kArchitecture >= 90;
    return launch_kernel<states_kernel<States>>(args, shape, device, stream);
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
