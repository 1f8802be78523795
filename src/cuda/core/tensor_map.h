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

// Boxes of `rank` dimensions of 16-bit elements, the innermost first and contiguous; `strides`, in
// bytes, are those of the others. A box's innermost dimension is a row of 128 bytes in shared
// memory, swizzled.
inline cudaError_t encode_tensor_map(CUtensorMap& map, bool bf16, uint32_t rank, void* data,
                                     const cuuint64_t* dims, const cuuint64_t* strides,
                                     const cuuint32_t* box) {
  cuuint32_t const steps[5] = {1, 1, 1, 1, 1};
  CUresult const error = tensor_map_encoder()(
      &map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, data,
      dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Makes the maps of one problem's tensors [batch, sequence, heads, dim]: boxes of 64 columns x
// `rows` rows of one head, which arrive as rows of 128 bytes, swizzled.
//
// A ragged map ends where a box's coordinates say: of sequences in one tensor each then ends in
// zeros, as if its tensor ended there. The rows are two dimensions of one stride, of which the
// first alone bounds a box, and the address is that of as many rows before the tensor as it has.
// Row r of a sequence of n rows, which ends before row `end` of the tensor, is at {column, rows - n
// + r, head, end, batch}.
struct TensorMapMaker {
  const AttentionProblem& problem;
  bool bf16;
  bool ragged = false;

  cudaError_t queries(CUtensorMap& map, const TensorView& tensor, int64_t dim, int rows) const {
    return encode(map, tensor, problem.queries, problem.heads_q, dim, rows);
  }
  cudaError_t keys(CUtensorMap& map, const TensorView& tensor, int64_t dim, int rows) const {
    return encode(map, tensor, problem.keys, problem.heads_q / problem.group, dim, rows);
  }

 private:
  cudaError_t encode(CUtensorMap& map, const TensorView& tensor, const Sequences& sequences,
                     int64_t heads, int64_t dim, int rows) const {
    bool const packed = sequences.offsets != nullptr;
    // No dimension may be 0; what does not exist is never asked for.
    auto const size = [](int64_t count) { return static_cast<cuuint64_t>(count > 0 ? count : 1); };
    cuuint64_t const dims[4] = {size(dim), size(packed ? sequences.total : sequences.seqlen),
                                size(heads), packed ? 1 : size(problem.batch)};
    cuuint64_t const strides[3] = {static_cast<cuuint64_t>(tensor.seq_stride * 2),
                                   static_cast<cuuint64_t>(tensor.head_stride * 2),
                                   static_cast<cuuint64_t>(tensor.batch_stride * 2)};
    cuuint32_t const box[5] = {64, static_cast<cuuint32_t>(rows), 1, 1, 1};
    if (!ragged) return encode_tensor_map(map, bf16, 4, tensor.data, dims, strides, box);
    int64_t const before = int64_t{packed ? sequences.total : sequences.seqlen} * tensor.seq_stride;
    if (reinterpret_cast<uintptr_t>(tensor.data) / 2 < static_cast<uint64_t>(before)) {
      return cudaErrorInvalidValue;
    }
    cuuint64_t const ragged_dims[5] = {dims[0], dims[1], dims[2], dims[1] + 1, dims[3]};
    cuuint64_t const ragged_strides[4] = {strides[0], strides[1], strides[0], strides[2]};
    return encode_tensor_map(map, bf16, 5, tensor.data - before, ragged_dims, ragged_strides, box);
  }
};

}  // namespace flashvar
