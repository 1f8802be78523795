// The forward on compute capability 9.0: chooses per call the wgmma kernels or, where those do not
// support the call, the mma.sync kernel of sm80. Only launchers include headers of another family.
#pragma once
#include "sm80/attention/fwd_launch.cuh"
#include "sm90/attention/fwd_wgmma_launch.cuh"

namespace flashvar::sm90::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct FwdLaunch {
  using Wgmma = FwdWgmmaLaunch<Target, Dtype, kHeadDim, kHeadDimV>;
  using MmaSync = sm80::attention::FwdLaunch<Target, Dtype, kHeadDim, kHeadDimV>;

  static constexpr AttentionFwdKernel row() {
    return {Dtype::kAbi, kHeadDim, kHeadDimV, {&Wgmma::workspace, &launch, &explain}};
  }

  static constexpr auto facts(const char* row) {
    return join(Wgmma::facts(row), MmaSync::facts_unaligned(row, "every other call"));
  }

 private:
  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    return Wgmma::supports(problem) ? Wgmma::launch(problem, device, stream)
                                    : MmaSync::launch_unaligned(problem, device, stream);
  }

  static void explain(const FwdProblem& problem, Text& text) {
    explain_wgmma(problem, nullptr, tensor_map_encoder() != nullptr, text);
  }
};

}  // namespace flashvar::sm90::attention
