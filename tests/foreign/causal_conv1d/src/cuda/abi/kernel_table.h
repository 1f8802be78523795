// The rows of the generated kernel tables: one type per op, named <Op>Kernel.
#pragma once
#include <cuda_runtime_api.h>

#include "abi/causalconv1d.h"

namespace causalconv1d {

struct Kernel {
  unsigned dtype;         // causalconv1d_dtype
  unsigned weight_dtype;  // causalconv1d_dtype
  cudaError_t (*launch)(const causalconv1d_call& call);
};
using ConvFwdKernel = Kernel;
using ConvBwdKernel = Kernel;
using ConvUpdateKernel = Kernel;

}  // namespace causalconv1d
