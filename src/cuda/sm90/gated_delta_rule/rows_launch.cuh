// Launches rows_kernel, dQ and dK of the backward, with wgmma; careful chunks as on sm_80.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "sm80/gated_delta_rule/rows_launch.cuh"
#include "sm90/gated_delta_rule/chunk_maps.h"
#include "sm90/gated_delta_rule/grad_rows.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype, int kDim>
struct RowsLaunch {
  static constexpr const char* kFamily = "wgmma";
  using Config = RowsConfig<Target, Dtype, kDim>;
  using Careful = sm80::gated_delta_rule::CarefulRowsLaunch<Target, Dtype, kDim>;

  static constexpr KernelFactsList<2> facts(const char* row) {
    return sm80::gated_delta_rule::rows_facts<Config, Careful>(row, kFamily);
  }

  static uint64_t bytes(const BwdProblem&) { return 0; }

  // Precondition: the call has chunks.
  static cudaError_t launch(const BwdProblem& problem, const GradWorkspace& workspace, int device,
                            cudaStream_t stream) {
    RowsArgs args{};
    args.problem = problem;
    args.workspace = workspace;
    args.items = sm80::gated_delta_rule::row_items(problem);
    ChunkMaps<Dtype> const maps{problem};
    cudaError_t error = maps.keys({{args.q, problem.q}, {args.k, problem.k}});
    if (error == cudaSuccess) {
      error = maps.values({{args.grad_out, problem.grad_out}, {args.grad_v, problem.grad_v}});
    }
    int multiprocessors = 0;
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return error;
    LaunchShape const shape{std::min(int64_t{args.items}, int64_t{multiprocessors}),
                            Config::kThreads, Config::kSharedMemory, true};
    error = launch_kernel<rows_kernel<Config>>(args, shape, device, stream);
    if (error != cudaSuccess) return error;
    return Careful::launch({problem, workspace, args.items}, true, device, stream);
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
