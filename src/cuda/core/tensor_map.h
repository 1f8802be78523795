// Encodes TMA tensor maps (CUtensorMap). Host only. The driver's encoder is looked up at run time,
// so that the library loads on machines without a driver.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.cuh"

namespace flashvar {

// cuTensorMapEncodeTiled, or null where there is no driver or it is older than CUDA 12.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static auto const found = [] {
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    void* address = nullptr;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000,
                                         cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();  // clears the error: the next caller must not see it
      address = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(address);
  }();
  return found;
}

template <class Dtype>
constexpr CUtensorMapDataType tensor_map_type() {
  return Dtype::kAbi == dtype::bf16::kAbi ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Encodes a tiled map of `rank` dimensions, innermost first. The innermost is contiguous;
// `strides`, in bytes, are those of the others. SWIZZLE_128B: the innermost extent of `box` must be
// 128 bytes. L2 promotion is 128 bytes too: with 256, L2 is asked for a quarter more sectors than
// the boxes have. Reads outside the tensor give zeros. cudaErrorNotSupported: there is no encoder.
inline cudaError_t encode_tensor_map(CUtensorMap& map, CUtensorMapDataType type, uint32_t rank,
                                     void* data, const cuuint64_t* dims, const cuuint64_t* strides,
                                     const cuuint32_t* box) {
  auto* const encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint32_t const element_strides[5] = {1, 1, 1, 1, 1};
  CUresult const error =
      encode(&map, type, rank, data, dims, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flashvar
