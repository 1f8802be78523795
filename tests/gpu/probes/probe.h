// What every probe needs: how it is exported, and how it waits for its kernel.
#pragma once
#include <cuda_runtime.h>

#include "sm90/pipeline.cuh"

#define FLASHVAR_PROBE extern "C" __attribute__((visibility("default"))) int

namespace probe {

using flashvar::ptx::smem_address;

// The CUDA error of a launch with `shared` bytes, complete when this returns; 0 is none.
template <class Kernel, class... Arguments>
int run(Kernel* kernel, int blocks, int threads, int shared, Arguments... arguments) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  kernel<<<blocks, threads, shared>>>(arguments...);
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}

}  // namespace probe
