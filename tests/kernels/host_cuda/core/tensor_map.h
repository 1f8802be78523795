// Stands for src/cuda/core/tensor_map.h: no driver encodes the maps.
#pragma once
#include <cuda.h>

#include <cstdlib>

#include "core/dtype.cuh"
#include "device.h"

namespace flashvar {

template <class Dtype>
constexpr CUtensorMapDataType tensor_map_type() {
  return Dtype::kAbi == dtype::bf16::kAbi ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

inline cudaError_t encode_tensor_map(CUtensorMap& map, CUtensorMapDataType, uint32_t rank,
                                     void* data, const cuuint64_t* dims, const cuuint64_t* strides,
                                     const cuuint32_t* box) {
  map = {static_cast<const unsigned char*>(data), rank, {}, {}, {}};
  if (box[0] != 64 || reinterpret_cast<uintptr_t>(data) % 16 != 0) std::abort();
  for (uint32_t i = 0; i < 5; ++i) {
    map.dims[i] = i < rank ? dims[i] : 1;
    map.box[i] = i < rank ? box[i] : 1;
    if (map.dims[i] == 0 || map.box[i] > 256) std::abort();
    if (i > 0) map.strides[i - 1] = i < rank ? strides[i - 1] : 0;
    if (i > 0 && map.strides[i - 1] % 16 != 0) std::abort();
  }
  return cudaSuccess;
}

}  // namespace flashvar
