// What every row of a kernel table has beside its axes: the host functions of an op. Host only.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/text.h"

namespace flashvar {

template <class Problem>
struct Launcher {
  uint64_t (*workspace)(const Problem& problem);  // bytes
  cudaError_t (*launch)(const Problem& problem, int device, cudaStream_t stream);
  void (*explain)(const Problem& problem, Text& text);
};

}  // namespace flashvar
