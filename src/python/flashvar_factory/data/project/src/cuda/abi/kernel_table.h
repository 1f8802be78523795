// The rows of the generated kernel table: one type per op, named <Op>Kernel.
#pragma once
#include <cuda_runtime_api.h>

#include "abi/vecadd.h"

namespace vecadd {

struct VectorAddKernel {
  unsigned dtype;  // vecadd_dtype
  int per_thread;  // elements
  cudaError_t (*launch)(const vecadd_vector_add_params& params);
};

}  // namespace vecadd
