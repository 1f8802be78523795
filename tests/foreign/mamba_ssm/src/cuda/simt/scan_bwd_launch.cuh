#pragma once
#include "abi/kernel_table.h"
#include "core/kernel_types.h"
#include "selective_scan_bwd_kernel.cuh"

namespace mambassm::simt {

template <class Target, class Dtype, class WeightDtype>
struct ScanBwdLaunch {
  using Element = typename Dtype::Element;
  using Weight = typename WeightDtype::Element;
  // Of the most shared memory among the lengths.
  using Largest =
      Selective_Scan_bwd_kernel_traits<128, 16, false, true, true, true, true, Element, Weight>;
  static constexpr int kSharedMemory =
      Largest::kSmemSize + MAX_DSTATE * static_cast<int>(sizeof(typename Largest::scan_t)) +
      (Largest::kNThreads + 4 * MAX_DSTATE) * static_cast<int>(sizeof(Weight));

  static constexpr ScanBwdKernel row() { return {Dtype::kAbi, WeightDtype::kAbi, &launch}; }

  static constexpr KernelFacts facts(const char* name) {
    return facts_of(name, Largest::kNThreads, kSharedMemory, Largest::kNThreads * Largest::kNItems);
  }

 private:
  static cudaError_t launch(const mambassm_call& call) {
    auto params = *static_cast<const SSMParamsBwd*>(call.params);
    foreign::first_error = cudaSuccess;
    selective_scan_bwd_cuda<Element, Weight>(params, static_cast<cudaStream_t>(call.stream));
    return foreign::first_error;
  }
};

}  // namespace mambassm::simt
