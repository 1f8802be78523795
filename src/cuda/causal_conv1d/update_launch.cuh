// Launches the update, on every architecture.
#pragma once
#include "causal_conv1d/kernel_table.h"
#include "causal_conv1d/launch.h"
#include "causal_conv1d/update.cuh"
#include "core/kernel_facts.h"

namespace flashvar::causal_conv1d {

// A thread reads few elements of a tensor: kernels are the same for every dtype.
template <class Target, class Dtype>
struct UpdateLaunch {
  static constexpr CausalConv1dUpdateKernel row() {
    return {Dtype::kAbi, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<1> facts(const char* row) {
    return {{KernelFactsMaker{row, "simt", "every call"}.make("update_kernel", kThreads, 0, 0)}};
  }

 private:
  // Blocks per SM in __launch_bounds__; 0: the compiler chooses. On 12.0 it would choose four, and
  // spill registers for that.
  static constexpr int kBlocksPerSM = Target::kArchitecture >= 120 ? 3 : 0;

  static uint64_t workspace(const UpdateProblem&) { return 0; }

  static cudaError_t launch(const UpdateProblem& problem, int device, cudaStream_t stream) {
    return with_width(problem.width, [&](auto width) {
      return launch_blocks<update_kernel<width, kBlocksPerSM>, Target>(
          problem, blocks_of(problem.batch * problem.dim), device, stream);
    });
  }

  static void explain_call(const UpdateProblem&, Text& text) {
    text.print("simt: a thread for each channel of a sequence");
  }
};

}  // namespace flashvar::causal_conv1d
