// Stands in for torch's header: the element type, which converts to float and back.
#pragma once
#include <cuda_fp16.h>

namespace at {

struct Half {
  __half value;

  Half() = default;
  __host__ __device__ Half(float number) : value(__float2half(number)) {}
  __host__ __device__ operator float() const { return __half2float(value); }
};

}  // namespace at
