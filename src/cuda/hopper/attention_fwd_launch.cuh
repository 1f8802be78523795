// Forward on 9.0: the wgmma kernels where they serve, else those of the mma.sync family.
#pragma once
#include "sm80/attention_fwd_launch.cuh"
#include "sm90/attention_fwd_launch.cuh"

namespace flashvar::hopper {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct AttentionFwdLaunch {
  using Wgmma = sm90::AttentionFwdLaunch<Target, Dtype, kHeadDim, kHeadDimV>;
  using MmaSync = sm80::AttentionFwdLaunch<Target, Dtype, kHeadDim, kHeadDimV>;

  static constexpr AttentionFwdKernel row() { return {Dtype::kAbi, kHeadDim, kHeadDimV, &launch}; }

  static constexpr KernelFacts facts(const char* name) { return Wgmma::facts(name); }

 private:
  static cudaError_t launch(const AttentionFwdProblem& problem, int device, cudaStream_t stream) {
    return Wgmma::serves(problem) ? Wgmma::launch(problem, device, stream)
                                  : MmaSync::launch(problem, device, stream);
  }
};

}  // namespace flashvar::hopper
