// Launches the forward: the records of all chunks, then the chains.
#pragma once
#include <cstdint>

#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "gated_delta_rule/kernel_table.h"
#include "sm80/gated_delta_rule/fwd.cuh"
#include "sm80/gated_delta_rule/prepare_launch.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype, int kHeadDim>
struct FwdLaunch {
  static constexpr int kDim = (kHeadDim + 63) / 64 * 64;  // of tiles, in whole column blocks
  using Prepare = PrepareConfig<Dtype, kDim>;
  using Config = FwdConfig<Target, Dtype, kDim>;

  static constexpr GatedDeltaRuleFwdKernel row() {
    return {Dtype::kAbi, kHeadDim, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<2> facts(const char* row) {
    KernelFactsMaker const maker{row, "mma.sync", "every call"};
    return {{maker.make("fwd_kernel", Config::kThreads, Config::kSharedMemory, kChunk,
                        Config::kColumns),
             maker.make("prepare_kernel", Prepare::kThreads, Prepare::kSharedMemory, kChunk)}};
  }

 private:
  static uint64_t workspace(const FwdProblem& problem) {
    return record_count(problem) * sizeof(ChunkRecord);
  }

  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    cudaError_t const error = launch_prepare<Prepare>(problem, device, stream);
    if (error != cudaSuccess) return error;
    int32_t const tiles = (problem.head_dim_v + Config::kColumns - 1) / Config::kColumns;
    FwdArgs const args{problem, static_cast<const ChunkRecord*>(problem.workspace), tiles};
    LaunchShape const shape{problem.sequences * problem.heads * tiles, Config::kThreads,
                            Config::kSharedMemory};
    return launch_kernel<fwd_kernel<Config>>(args, shape, device, stream);
  }

  static void explain_call(const FwdProblem&, Text& text) {
    text.print("mma.sync: chunks of %d tokens, %d columns of v at a time", kChunk,
               Config::kColumns);
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
