// The host functions of a row of a kernel table. Each op's row types add its axes. Host only.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/text.h"

namespace flashvar {

template <class Problem>
struct Launcher {
  // Bytes of device memory that the call needs.
  uint64_t (*workspace)(const Problem& problem);
  // Enqueues the kernels.
  cudaError_t (*launch)(const Problem& problem, int device, cudaStream_t stream);
  // Appends which kernels the call launches, and why.
  void (*explain)(const Problem& problem, Text& text);
};

}  // namespace flashvar
