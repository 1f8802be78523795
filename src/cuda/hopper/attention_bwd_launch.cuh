// Backward on 9.0: the wgmma kernels where they serve, else those of the mma.sync family.
#pragma once
#include <algorithm>

#include "sm80/attention_bwd_launch.cuh"
#include "sm90/attention_bwd_launch.cuh"

namespace flashvar::hopper {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct AttentionBwdLaunch {
  using Wgmma = sm90::AttentionBwdLaunch<Target, Dtype, kHeadDim, kHeadDimV>;
  using MmaSync = sm80::AttentionBwdLaunch<Target, Dtype, kHeadDim, kHeadDimV>;

  static constexpr AttentionBwdKernel row() {
    return {Dtype::kAbi, kHeadDim, kHeadDimV, &workspace, &launch};
  }

  static constexpr KernelFacts facts(const char* name) { return Wgmma::facts(name); }

 private:
  // A size is asked for once, whatever the tensors' addresses: enough for both.
  static uint64_t workspace(const AttentionBwdProblem& problem) {
    uint64_t const size = MmaSync::row().workspace(for_mma_sync(problem));
    return Wgmma::suits(problem) ? std::max(size, Wgmma::workspace(problem)) : size;
  }

  static cudaError_t launch(const AttentionBwdProblem& problem, int device, cudaStream_t stream) {
    return Wgmma::serves(problem) ? Wgmma::launch(problem, device, stream)
                                  : MmaSync::row().launch(for_mma_sync(problem), device, stream);
  }

  // Where wgmma, which mostly serves, needs no sums of dQ, mma.sync is to need none either.
  static AttentionBwdProblem for_mma_sync(AttentionBwdProblem problem) {
    if (Wgmma::suits(problem) && !Wgmma::sums_grad_q(problem)) problem.deterministic = true;
    return problem;
  }
};

}  // namespace flashvar::hopper
