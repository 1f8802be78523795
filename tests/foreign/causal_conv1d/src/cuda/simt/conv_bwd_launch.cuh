#pragma once
#include "abi/kernel_table.h"
#include "causal_conv1d_bwd.cuh"
#include "core/kernel_types.h"

namespace causalconv1d::simt {

template <class Target, class Dtype, class WeightDtype>
struct ConvBwdLaunch {
  using Element = typename Dtype::Element;
  using Weight = typename WeightDtype::Element;
  // Of the most shared memory among the widths and layouts.
  using Largest = Causal_conv1d_bwd_kernel_traits<128, 4, true, false, Element, Weight>;

  static constexpr ConvBwdKernel row() { return {Dtype::kAbi, WeightDtype::kAbi, &launch}; }

  static constexpr KernelFacts facts(const char* name) {
    return facts_of(name, Largest::kNThreads, Largest::kSmemSize,
                    Largest::kNThreads * Largest::kNElts);
  }

 private:
  static cudaError_t launch(const causalconv1d_call& call) {
    auto params = *static_cast<const ConvParamsBwd*>(call.params);
    auto const stream = static_cast<cudaStream_t>(call.stream);
    foreign::first_error = cudaSuccess;
    if (call.channel_last != 0) {
      causal_conv1d_channellast_bwd_cuda<Element, Weight>(params, stream);
    } else {
      causal_conv1d_bwd_cuda<Element, Weight>(params, stream);
    }
    return foreign::first_error;
  }
};

}  // namespace causalconv1d::simt
