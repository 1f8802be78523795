// Stands in for torch's header: errors are kept for the C interface, which returns them.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace foreign {

inline thread_local cudaError_t first_error = cudaSuccess;

inline void keep(cudaError_t error) {
  if (first_error == cudaSuccess) first_error = error;
}

}  // namespace foreign

#define C10_CUDA_CHECK(call) ::foreign::keep(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() ::foreign::keep(cudaGetLastError())
