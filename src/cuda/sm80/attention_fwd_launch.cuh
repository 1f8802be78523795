// Launches attention_fwd_kernel: grid, shared memory, and which of its three copies.
#pragma once
#include "abi/kernel_table.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "sm80/attention_fwd.cuh"

namespace flashvar::sm80 {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct AttentionFwdLaunch {
  template <bool kFeatures>
  using Config = AttentionFwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kFeatures>;

  static constexpr AttentionFwdKernel row() { return {Dtype::kAbi, kHeadDim, kHeadDimV, &launch}; }

  static constexpr KernelFacts facts(const char* name) {
    using Plain = Config<false>;
    return KernelFacts::make(name, Plain::kThreads, Plain::kSharedMemory, Plain::kBlockQ,
                             Plain::kBlockKV);
  }

 private:
  static cudaError_t launch(const AttentionFwdProblem& problem, int device, cudaStream_t stream) {
    if (!problem.rows_are_aligned()) return launch_copy<true, false>(problem, device, stream);
    return problem.has_features() ? launch_copy<true, true>(problem, device, stream)
                                  : launch_copy<false, true>(problem, device, stream);
  }

  template <bool kFeatures, bool kAligned>
  static cudaError_t launch_copy(const AttentionFwdProblem& problem, int device,
                                 cudaStream_t stream) {
    using C = Config<kFeatures>;
    int64_t const tiles = Block::tiles(problem, C::kBlockQ);
    LaunchShape const shape{tiles * problem.heads_q, C::kThreads, C::kSharedMemory};
    return launch_kernel<attention_fwd_kernel<C, kAligned>>(problem, shape, device, stream);
  }
};

}  // namespace flashvar::sm80
