#pragma once
#include "abi/kernel_table.h"
#include "causal_conv1d_update.cuh"
#include "core/kernel_types.h"

namespace causalconv1d::simt {

template <class Target, class Dtype, class WeightDtype>
struct ConvUpdateLaunch {
  using Element = typename Dtype::Element;
  using Weight = typename WeightDtype::Element;
  static constexpr int kThreads = 64;

  static constexpr ConvUpdateKernel row() { return {Dtype::kAbi, WeightDtype::kAbi, &launch}; }

  static constexpr KernelFacts facts(const char* name) {
    return facts_of(name, kThreads, 0, kThreads);
  }

 private:
  static cudaError_t launch(const causalconv1d_call& call) {
    auto params = *static_cast<const ConvParamsBase*>(call.params);
    foreign::first_error = cudaSuccess;
    causal_conv1d_update_cuda<Element, Weight>(params, static_cast<cudaStream_t>(call.stream));
    return foreign::first_error;
  }
};

}  // namespace causalconv1d::simt
