// Loads and stores of elements whose dtype is known only at run time, as fp32. A View is any struct
// with the address `data` and the dtype's kAbi, `dtype`.
#pragma once
#include <cstdint>

#include "core/dtype.cuh"

namespace flashvar {

// Loads an element without converting it. Conversion is a step of its own, so that several loads
// are in flight before the first is waited for.
template <class View>
__device__ __forceinline__ uint32_t load_bits(const View& view, int64_t index) {
  if (view.dtype == dtype::fp32::kAbi) return static_cast<const uint32_t*>(view.data)[index];
  return static_cast<const uint16_t*>(view.data)[index];
}

template <class View>
__device__ __forceinline__ float value_of_16_bits(const View& view, uint16_t word) {
  return view.dtype == dtype::bf16::kAbi ? dtype::bf16::unpack(word) : dtype::fp16::unpack(word);
}

template <class View>
__device__ __forceinline__ float value_of(const View& view, uint32_t bits) {
  if (view.dtype == dtype::fp32::kAbi) return __uint_as_float(bits);
  return value_of_16_bits(view, static_cast<uint16_t>(bits));
}

template <class View>
__device__ __forceinline__ float load_value(const View& view, int64_t index) {
  if (view.dtype == dtype::fp32::kAbi) return static_cast<const float*>(view.data)[index];
  return value_of_16_bits(view, static_cast<const uint16_t*>(view.data)[index]);
}

template <class View>
__device__ __forceinline__ void store_value(const View& view, int64_t index, float value) {
  if (view.dtype == dtype::fp32::kAbi) {
    static_cast<float*>(view.data)[index] = value;
  } else {
    uint32_t const packed = view.dtype == dtype::bf16::kAbi ? dtype::bf16::pack(value, 0.f)
                                                            : dtype::fp16::pack(value, 0.f);
    static_cast<uint16_t*>(view.data)[index] = static_cast<uint16_t>(packed);
  }
}

}  // namespace flashvar
