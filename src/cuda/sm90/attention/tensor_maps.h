// TensorMapEncoder: tensor maps of attention's tensors. Host only.
#pragma once
#include "attention/problem.h"
#include "core/tensor_map.h"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// Encodes maps whose boxes are one column block (128 bytes) of `rows` rows of one head.
//
// Clipped maps are for varlen tensors, where rows after a sequence's end belong to the next
// sequence: a coordinate says where a box must end, and TMA writes zeros after that. The tensor's
// R rows are two dimensions of the map, both with the stride of rows. The first has R elements and
// clips the box; the second shifts it. The map's base address lies R rows in front of the tensor.
// Row r of a sequence of n rows that ends at tensor row `end` has the coordinates {column, R - n +
// r, head, end, batch} (VarlenCoordinate): tensor row (R - n + r) + end - R = end - n + r.
struct TensorMapEncoder {
  const Problem& problem;
  CUtensorMapDataType type;
  bool clipped = false;

  cudaError_t queries(CUtensorMap& map, const Tensor& tensor, int64_t dim, int rows) const {
    return encode(map, tensor, problem.queries, problem.heads_q, dim, rows);
  }
  cudaError_t keys(CUtensorMap& map, const Tensor& tensor, int64_t dim, int rows) const {
    return encode(map, tensor, problem.keys, problem.heads_q / problem.group, dim, rows);
  }

 private:
  cudaError_t encode(CUtensorMap& map, const Tensor& tensor, const Sequences& sequences,
                     int64_t heads, int64_t dim, int rows) const {
    constexpr int kElementBytes = sizeof(*tensor.data);
    bool const varlen = sequences.offsets != nullptr;
    // The driver rejects dimensions of 0; kernels load nothing from such a tensor.
    auto const size = [](int64_t count) { return static_cast<cuuint64_t>(count > 0 ? count : 1); };
    cuuint64_t const dims[4] = {size(dim), size(varlen ? sequences.total : sequences.seqlen),
                                size(heads), varlen ? 1 : size(problem.batch)};
    cuuint64_t const strides[3] = {static_cast<cuuint64_t>(tensor.seq_stride * kElementBytes),
                                   static_cast<cuuint64_t>(tensor.head_stride * kElementBytes),
                                   static_cast<cuuint64_t>(tensor.batch_stride * kElementBytes)};
    cuuint32_t const box[5] = {128 / kElementBytes, static_cast<cuuint32_t>(rows), 1, 1, 1};
    if (!clipped) return encode_tensor_map(map, type, 4, tensor.data, dims, strides, box);
    int64_t const before = int64_t{varlen ? sequences.total : sequences.seqlen} * tensor.seq_stride;
    if (reinterpret_cast<uintptr_t>(tensor.data) / kElementBytes < static_cast<uint64_t>(before)) {
      return cudaErrorInvalidValue;
    }
    cuuint64_t const clipped_dims[5] = {dims[0], dims[1], dims[2], dims[1] + 1, dims[3]};
    cuuint64_t const clipped_strides[4] = {strides[0], strides[1], strides[0], strides[2]};
    return encode_tensor_map(map, type, 5, tensor.data - before, clipped_dims, clipped_strides,
                             box);
  }
};

// Encodes the maps of a backward kernel's arguments, for tiles of block_q queries and block_kv
// keys.
template <class Args>
cudaError_t encode_bwd_tensor_maps(Args& args, const TensorMapEncoder& encoder, int block_q,
                                   int block_kv) {
  const auto& problem = args.problem;
  cudaError_t error = encoder.queries(args.q, problem.q, problem.head_dim, block_q);
  if (error == cudaSuccess) {
    error = encoder.queries(args.grad_out, problem.grad_out, problem.head_dim_v, block_q);
  }
  if (error == cudaSuccess) {
    error = encoder.keys(args.k, problem.k, problem.head_dim, block_kv);
  }
  if (error == cudaSuccess) {
    error = encoder.keys(args.v, problem.v, problem.head_dim_v, block_kv);
  }
  return error;
}

}  // namespace flashvar::sm90::attention
