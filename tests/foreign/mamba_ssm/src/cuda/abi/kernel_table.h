// The rows of the generated kernel tables: one type per op, named <Op>Kernel.
#pragma once
#include <cuda_runtime_api.h>

#include "abi/mambassm.h"

namespace mambassm {

struct Kernel {
  unsigned dtype;         // mambassm_dtype
  unsigned weight_dtype;  // mambassm_dtype
  cudaError_t (*launch)(const mambassm_call& call);
};
using ScanFwdKernel = Kernel;
using ScanBwdKernel = Kernel;

}  // namespace mambassm
