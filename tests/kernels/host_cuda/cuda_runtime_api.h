// Stands for the CUDA runtime where kernels run on the host: what sources of src/cuda use of it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static  // blocks run one after the other

using std::max;
using std::min;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNotSupported = 801
};
using cudaStream_t = struct CUstream_st*;

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
extern "C" {
inline int multiprocessors = 3;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = multiprocessors;
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
