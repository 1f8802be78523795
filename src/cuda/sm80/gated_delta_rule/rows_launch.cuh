// Launches the gradients of rows of the backward.
#pragma once
#include <cstdint>

#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "sm80/gated_delta_rule/grad_rows.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype, int kDim>
struct RowsLaunch {
  static constexpr char kFamily[] = "mma.sync";
  template <bool kCareful>
  using Config = RowsConfig<Target, Dtype, kDim, kCareful>;

  static constexpr KernelFactsList<2> facts(const char* row) {
    KernelFactsMaker const maker{row, kFamily, "every call"};
    return {{maker.make("rows_kernel", Config<false>::kThreads, Config<false>::kSharedMemory,
                        kChunk, kDim),
             maker.make("rows_kernel, careful", Config<true>::kThreads, Config<true>::kSharedMemory,
                        kChunk, kDim)}};
  }

  // `slots`: chunks, at least one.
  static cudaError_t launch(const BwdProblem& problem, const GradWorkspace& workspace,
                            int64_t slots, int device, cudaStream_t stream) {
    cudaError_t const error = launch_kernel<rows_kernel<Config<false>>>(
        RowsArgs{problem, workspace},
        shape<Config<false>>(problem, slots, Target::kArchitecture >= 90), device, stream);
    if (error != cudaSuccess) return error;
    return launch_kernel<rows_kernel<Config<true>>>(
        RowsArgs{problem, workspace}, shape<Config<true>>(problem, slots, false), device, stream);
  }

 private:
  template <class C>
  static LaunchShape shape(const BwdProblem& problem, int64_t slots, bool programmatic) {
    return {slots * problem.heads_qk, C::kThreads, C::kSharedMemory, programmatic};
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
