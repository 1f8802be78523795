// Loads and stores elements of tensors whose dtype is a run-time value, as fp32.
#pragma once
#include <cstdint>

#include "causal_conv1d/problem.h"
#include "core/dtype.cuh"

namespace flashvar::causal_conv1d {

__device__ __forceinline__ int64_t offset(const Tensor& tensor, int64_t first, int64_t second,
                                          int64_t third) {
  return first * tensor.strides[0] + second * tensor.strides[1] + third * tensor.strides[2];
}

// Loads an element without converting it: nothing waits for the load before the conversion.
__device__ __forceinline__ uint32_t load_bits(const Tensor& tensor, int64_t offset) {
  if (tensor.dtype == dtype::fp32::kAbi) return static_cast<const uint32_t*>(tensor.data)[offset];
  return static_cast<const uint16_t*>(tensor.data)[offset];
}

__device__ __forceinline__ float value_of(const Tensor& tensor, uint32_t bits) {
  if (tensor.dtype == dtype::fp32::kAbi) return __uint_as_float(bits);
  auto const word = static_cast<uint16_t>(bits);
  return tensor.dtype == dtype::bf16::kAbi ? dtype::bf16::unpack(word) : dtype::fp16::unpack(word);
}

__device__ __forceinline__ float load(const Tensor& tensor, int64_t offset) {
  return value_of(tensor, load_bits(tensor, offset));
}

__device__ __forceinline__ void store(const Tensor& tensor, int64_t offset, float value) {
  if (tensor.dtype == dtype::fp32::kAbi) {
    static_cast<float*>(tensor.data)[offset] = value;
  } else {
    uint32_t const packed = tensor.dtype == dtype::bf16::kAbi ? dtype::bf16::pack(value, 0.f)
                                                              : dtype::fp16::pack(value, 0.f);
    static_cast<uint16_t*>(tensor.data)[offset] = static_cast<uint16_t>(packed);
  }
}

__device__ __forceinline__ int64_t load(const Indices& indices, int64_t i) {
  return indices.is_int64 ? static_cast<const int64_t*>(indices.data)[i]
                          : static_cast<const int32_t*>(indices.data)[i];
}

}  // namespace flashvar::causal_conv1d
