#include <cstdio>

#include "abi/kernel_table.h"

namespace vecadd {
#include "vector_add_kernels.inc"  // constexpr const VectorAddKernel* kVectorAddKernels[]

namespace {

thread_local char message[256] = "";

// The kernel with the most elements per thread of those whose pieces divide the length.
const VectorAddKernel* find(const vecadd_vector_add_params& params) {
  const VectorAddKernel* best = nullptr;
  for (const VectorAddKernel* const* row = kVectorAddKernels; *row != nullptr; ++row) {
    if ((*row)->dtype != params.dtype || params.length % (*row)->per_thread != 0) continue;
    if (best == nullptr || (*row)->per_thread > best->per_thread) best = *row;
  }
  return best;
}

}  // namespace
}  // namespace vecadd

const char* vecadd_last_error(void) { return vecadd::message; }

vecadd_status vecadd_vector_add(const vecadd_vector_add_params* params) {
  const vecadd::VectorAddKernel* const kernel = vecadd::find(*params);
  if (kernel == nullptr) {
    std::snprintf(vecadd::message, sizeof(vecadd::message), "no vector_add kernel for dtype %u",
                  params->dtype);
    return VECADD_NO_KERNEL;
  }
  if (params->length == 0) return VECADD_OK;
  cudaError_t const error = kernel->launch(*params);
  if (error == cudaSuccess) return VECADD_OK;
  std::snprintf(vecadd::message, sizeof(vecadd::message), "vector_add: %s",
                cudaGetErrorString(error));
  return VECADD_CUDA_ERROR;
}
