// Stands in for torch's header: errors are kept for the C interface, which returns them.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace causalconv1d {

inline thread_local cudaError_t first_error = cudaSuccess;

inline void keep(cudaError_t error) {
  if (first_error == cudaSuccess) first_error = error;
}

}  // namespace causalconv1d

#define C10_CUDA_CHECK(call) ::causalconv1d::keep(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() ::causalconv1d::keep(cudaGetLastError())
