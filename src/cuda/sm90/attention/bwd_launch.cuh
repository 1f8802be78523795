// The backward on compute capability 9.0: chooses per call the wgmma kernels or, where those do not
// support the call, the mma.sync kernels of sm80. Only launchers include headers of
// another family.
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

  static constexpr auto facts(const char* row) {
    return join(Wgmma::facts(row), MmaSync::facts(row, "every other call"));
  }

 private:
  // Enough for either family: callers ask once per shape, before they know the addresses and so the
  // alignment.
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
    const char* unsupported = Wgmma::unsupported(problem);
    if (unsupported == nullptr && !Wgmma::is_addressable(problem)) {
      unsupported = "tensors lie so low in memory that tensor maps would begin below address 0";
    }
    explain_wgmma(problem, unsupported, tensor_map_encoder() != nullptr, text);
  }

  // Where the wgmma kernels do not sum dQ in the workspace, the mma.sync kernels, to which
  // unaligned calls fall back, run in deterministic mode, which does not sum it either. workspace()
  // must suffice for both families: with sums it would be much larger in every call.
  static BwdProblem for_mma_sync(BwdProblem problem) {
    if (Wgmma::unsupported(problem) == nullptr && !Wgmma::sums_grad_q(problem)) {
      problem.deterministic = true;
    }
    return problem;
  }
};

}  // namespace flashvar::sm90::attention
