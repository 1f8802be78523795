// Stands in for torch's header: the element type, which converts to float and back.
#pragma once
#include <cuda_bf16.h>

namespace at {

struct BFloat16 {
  __nv_bfloat16 value;

  BFloat16() = default;
  __host__ __device__ BFloat16(float number) : value(__float2bfloat16(number)) {}
  __host__ __device__ operator float() const { return __bfloat162float(value); }
};

}  // namespace at
