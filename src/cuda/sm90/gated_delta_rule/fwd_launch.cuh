// Launches the forward: the records of all chunks, then the chains.
#pragma once
#include <cstdint>

#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "gated_delta_rule/kernel_table.h"
#include "sm80/gated_delta_rule/prepare_launch.cuh"
#include "sm90/gated_delta_rule/chunk_maps.h"
#include "sm90/gated_delta_rule/fwd.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype, int kHeadDim>
struct FwdLaunch {
  static constexpr int kDim = (kHeadDim + 63) / 64 * 64;  // of tiles, in whole column blocks
  using Prepare = sm80::gated_delta_rule::PrepareConfig<Dtype, kDim>;
  template <int kWarpgroups>
  using Config = FwdConfig<Target, Dtype, kDim, kWarpgroups>;

  static constexpr GatedDeltaRuleFwdKernel row() {
    return {Dtype::kAbi, kHeadDim, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<3> facts(const char* row) {
    KernelFactsMaker const chain{row, "wgmma", "every call"};
    KernelFactsMaker const prepare{row, "mma.sync", "every call"};
    return {{chain.make("fwd_kernel", Config<2>::kThreads, Config<2>::kSharedMemory, kChunk,
                        Config<2>::kColumns),
             chain.make("fwd_kernel, few heads", Config<1>::kThreads, Config<1>::kSharedMemory,
                        kChunk, Config<1>::kColumns),
             prepare.make("prepare_kernel", Prepare::kThreads, Prepare::kSharedMemory, kChunk)}};
  }

 private:
  static uint64_t workspace(const FwdProblem& problem) {
    return sm80::gated_delta_rule::record_count(problem) * sizeof(ChunkRecord);
  }

  static int64_t blocks(const FwdProblem& problem, int columns) {
    return problem.sequences * problem.heads * ((problem.head_dim_v + columns - 1) / columns);
  }

  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    int multiprocessors = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = sm80::gated_delta_rule::launch_prepare<Prepare>(problem, device, stream);
    }
    if (error != cudaSuccess) return error;
    return blocks(problem, Config<1>::kColumns) <= multiprocessors
               ? launch_chains<Config<1>>(problem, device, stream)
               : launch_chains<Config<2>>(problem, device, stream);
  }

  template <class C>
  static cudaError_t launch_chains(const FwdProblem& problem, int device, cudaStream_t stream) {
    FwdArgs args{};
    args.problem = problem;
    args.records = static_cast<const ChunkRecord*>(problem.workspace);
    args.column_tiles = (problem.head_dim_v + C::kColumns - 1) / C::kColumns;
    ChunkMaps<Dtype> const maps{problem};
    cudaError_t error = maps.encode(args.q, problem.q, problem.heads_qk, problem.head_dim);
    if (error == cudaSuccess) {
      error = maps.encode(args.k, problem.k, problem.heads_qk, problem.head_dim);
    }
    if (error == cudaSuccess) {
      error = maps.encode(args.v, problem.v, problem.heads, problem.head_dim_v);
    }
    if (error != cudaSuccess) return error;
    LaunchShape shape{blocks(problem, C::kColumns), C::kThreads, C::kSharedMemory};
    // Its blocks start while the last records are written, where there are any.
    shape.programmatic = sm80::gated_delta_rule::record_count(problem) > 0;
    return launch_kernel<fwd_kernel<C>>(args, shape, device, stream);
  }

  static void explain_call(const FwdProblem&, Text& text) {
    text.print(
        "wgmma: chunks of %d tokens, %d columns of v at a time, or %d where that fills the device",
        kChunk, Config<2>::kColumns, Config<1>::kColumns);
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
