// Addresses and accesses of elements of the call's tensors.
#pragma once
#include <cstdint>

#include "causal_conv1d/problem.h"
#include "core/any_dtype.cuh"

namespace flashvar::causal_conv1d {

__device__ __forceinline__ int64_t offset(const Tensor& tensor, int64_t first, int64_t second,
                                          int64_t third) {
  return first * tensor.strides[0] + second * tensor.strides[1] + third * tensor.strides[2];
}

__device__ __forceinline__ float load(const Tensor& tensor, int64_t offset) {
  return value_of(tensor, load_bits(tensor, offset));
}

__device__ __forceinline__ void store(const Tensor& tensor, int64_t offset, float value) {
  store_value(tensor, offset, value);
}

__device__ __forceinline__ int64_t load(const Indices& indices, int64_t i) {
  return indices.is_int64 ? static_cast<const int64_t*>(indices.data)[i]
                          : static_cast<const int32_t*>(indices.data)[i];
}

}  // namespace flashvar::causal_conv1d
