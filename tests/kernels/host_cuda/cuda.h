// Stands for the driver's header: a tensor map as its parameters.
#pragma once
#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9
};

// Of 16-bit elements, innermost dimension first; strides in bytes, of the dimensions after it.
struct CUtensorMap {
  const unsigned char* data;
  uint32_t rank;
  cuuint64_t dims[5], strides[4];
  cuuint32_t box[5];
};
