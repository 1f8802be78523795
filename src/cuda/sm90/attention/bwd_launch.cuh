// The backward on 9.0: picks per call the wgmma kernels or, where those do not support it, the
// mma.sync kernels of sm80. Launchers alone may include another family.
#pragma once
#include <algorithm>

#include "sm80/attention/bwd_launch.cuh"
#include "sm90/attention/bwd_wgmma_launch.cuh"

namespace flashvar::sm90::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct BwdLaunch {
  using Wgmma = BwdWgmmaLaunch<Target, Dtype, kHeadDim, kHeadDimV>;
  using MmaSync = sm80::attention::BwdLaunch<Target, Dtype, kHeadDim, kHeadDimV>;

  static constexpr AttentionBwdKernel row() {
    return {Dtype::kAbi, kHeadDim, kHeadDimV, {&workspace, &launch, &explain}};
  }

  static constexpr KernelFactsList<7> facts(const char* row) {
    return join(Wgmma::facts(row), MmaSync::facts(row, "every other call"));
  }

 private:
  // Callers ask once per shape, before addresses are known: enough for either choice.
  static uint64_t workspace(const BwdProblem& problem) {
    uint64_t const size = MmaSync::workspace(for_mma_sync(problem));
    return Wgmma::unsupported(problem) == nullptr ? std::max(size, Wgmma::workspace(problem))
                                                  : size;
  }

  static cudaError_t launch(const BwdProblem& problem, int device, cudaStream_t stream) {
    return Wgmma::supports(problem) ? Wgmma::launch(problem, device, stream)
                                    : MmaSync::launch(for_mma_sync(problem), device, stream);
  }

  static void explain(const BwdProblem& problem, Text& text) {
    explain_wgmma(problem, Wgmma::unsupported(problem), tensor_map_encoder() != nullptr, text);
  }

  // Where wgmma would not sum dQ in the workspace, mma.sync must not either: the workspace would be
  // much larger for a fallback that unaligned tensors alone take.
  static BwdProblem for_mma_sync(BwdProblem problem) {
    if (Wgmma::unsupported(problem) == nullptr && !Wgmma::sums_grad_q(problem))
      problem.deterministic = true;
    return problem;
  }
};

}  // namespace flashvar::sm90::attention
