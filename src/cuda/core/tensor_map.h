// Tensor maps: what the copy engine knows of a tensor. Host only; encoded by the driver, whose
// entry point is found at run time.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"

namespace flashvar {

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static auto const found = [] {
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    void* address = nullptr;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000,
                                         cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();  // not the next caller's error
      address = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(address);
  }();
  return found;
}

// Sizes of a 4-D tensor [batch, sequence, heads, head_dim].
struct TensorSizes {
  int64_t batch, sequence, heads, head_dim;
};

// Boxes of 64 columns x `rows` rows of one head, in shared memory as rows of 128 bytes, swizzled.
inline cudaError_t encode_tensor_map(CUtensorMap& map, const TensorView& tensor,
                                     const TensorSizes& sizes, bool bf16, int rows) {
  auto const encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorInsufficientDriver;
  cuuint64_t const dims[4] = {
      static_cast<cuuint64_t>(sizes.head_dim), static_cast<cuuint64_t>(sizes.sequence),
      static_cast<cuuint64_t>(sizes.heads), static_cast<cuuint64_t>(sizes.batch)};
  cuuint64_t const strides[3] = {static_cast<cuuint64_t>(tensor.seq_stride * 2),
                                 static_cast<cuuint64_t>(tensor.head_stride * 2),
                                 static_cast<cuuint64_t>(tensor.batch_stride * 2)};
  cuuint32_t const box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  cuuint32_t const steps[4] = {1, 1, 1, 1};
  CUresult const error =
      encode(&map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             tensor.data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flashvar
