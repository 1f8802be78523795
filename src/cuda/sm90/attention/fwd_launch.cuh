// The forward on compute capability 9.0: chooses per call the wgmma kernels or, where those do not
// support the call or are slower, the mma.sync kernels of sm80. Only launchers include headers of
// another family.
#pragma once
#include <algorithm>

#include "sm80/attention/fwd_launch.cuh"
#include "sm90/attention/fwd_wgmma_launch.cuh"
#include "sm90/attention/short_sequences.h"

namespace flashvar::sm90::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct FwdLaunch {
  using Wgmma = FwdWgmmaLaunch<Target, Dtype, kHeadDim, kHeadDimV>;
  using MmaSync = sm80::attention::FwdLaunch<Target, Dtype, kHeadDim, kHeadDimV>;

  static constexpr AttentionFwdKernel row() {
    return {Dtype::kAbi, kHeadDim, kHeadDimV, {&workspace, &launch, &explain}};
  }

  static constexpr auto facts(const char* row) {
    return join(Wgmma::facts(row), MmaSync::facts(row, "every other call"));
  }

 private:
  // Enough for either, because the tensors' addresses may not be known yet.
  static uint64_t workspace(const FwdProblem& problem) {
    return std::max(Wgmma::workspace(problem), MmaSync::workspace(problem));
  }

  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    return Wgmma::supports(problem) && why_mma_sync(problem) == nullptr
               ? Wgmma::launch(problem, device, stream)
               : MmaSync::launch(problem, device, stream);
  }

  static void explain(const FwdProblem& problem, Text& text) {
    explain_wgmma(problem, why_mma_sync(problem), tensor_map_encoder() != nullptr, text);
  }

  // Why the mma.sync kernels are faster; null: they are not.
  static const char* why_mma_sync(const FwdProblem& problem) {
    constexpr ShortSequences kShort = short_sequences(std::max(kHeadDim, kHeadDimV));
    int const limit = problem.has_modifiers() ? kShort.fwd_modifiers : kShort.fwd;
    return have_at_most(problem, limit) ? kWhyShort : nullptr;
  }
};

}  // namespace flashvar::sm90::attention
