#pragma once
#include "abi/kernel_table.h"
#include "core/kernel_types.h"
#include "selective_scan_fwd_kernel.cuh"

namespace mambassm::simt {

template <class Target, class Dtype, class WeightDtype>
struct ScanFwdLaunch {
  using Element = typename Dtype::Element;
  using Weight = typename WeightDtype::Element;
  // Of the most shared memory among the lengths.
  using Largest =
      Selective_Scan_fwd_kernel_traits<128, 16, 1, false, true, true, true, Element, Weight>;
  static constexpr int kSharedMemory =
      Largest::kSmemSize + MAX_DSTATE * static_cast<int>(sizeof(typename Largest::scan_t));

  static constexpr ScanFwdKernel row() { return {Dtype::kAbi, WeightDtype::kAbi, &launch}; }

  static constexpr KernelFacts facts(const char* name) {
    return facts_of(name, Largest::kNThreads, kSharedMemory, Largest::kNThreads * Largest::kNItems);
  }

 private:
  static cudaError_t launch(const mambassm_call& call) {
    auto params = *static_cast<const SSMParamsBase*>(call.params);
    foreign::first_error = cudaSuccess;
    selective_scan_fwd_cuda<Element, Weight>(params, static_cast<cudaStream_t>(call.stream));
    return foreign::first_error;
  }
};

}  // namespace mambassm::simt
