// TensorMapEncoder: tensor maps of attention's tensors. Host only.
#pragma once
#include "attention/problem.h"
#include "core/tensor_map.h"
#include "sm90/clipped_map.h"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// Encodes maps whose boxes are one column block (128 bytes) of `rows` rows of one head. Those of
// the dK and dV kernel with kDynamic are `clipped` (clipped_map.h), with coordinates as in
// ClippedCoordinate; the forward and the dQ kernel zero the rows past a sequence's end.
struct TensorMapEncoder {
  const Problem& problem;
  CUtensorMapDataType type;
  bool clipped = false;

  cudaError_t queries(CUtensorMap& map, const Tensor& tensor, int64_t dim, int rows) const {
    // Varlen queries in a dense problem (PackGQA): the batch dimension has all their rows.
    int64_t const batch =
        problem.splits.query_offsets == nullptr ? problem.batch : problem.queries.total;
    return encode(map, tensor, problem.queries, batch, problem.heads_q, dim, rows);
  }
  // Likewise, with PackGQA's members (KeySplits) as a dimension after the columns.
  cudaError_t members(CUtensorMap& map, const Tensor& tensor, int64_t dim, int rows) const {
    const KeySplits& splits = problem.splits;
    bool const varlen = problem.queries.offsets != nullptr;
    int32_t const shift = splits.row_shift;
    int64_t const seqlen = varlen ? problem.queries.total : problem.queries.seqlen >> shift;
    int64_t const batch = splits.query_offsets != nullptr ? problem.queries.total
                          : varlen                        ? 1
                                                          : problem.batch;
    cuuint64_t const dims[5] = {size(dim), size(splits.members), size(seqlen),
                                size(problem.heads_q), size(batch)};
    cuuint64_t const strides[4] = {bytes(shift > 0 ? splits.member_stride : tensor.seq_stride),
                                   bytes(tensor.seq_stride), bytes(tensor.head_stride),
                                   bytes(tensor.batch_stride)};
    cuuint32_t const box[5] = {128 / kElementBytes, 1u << shift,
                               static_cast<cuuint32_t>(rows) >> shift, 1, 1};
    return encode_tensor_map(map, type, 5, tensor.data, dims, strides, box);
  }
  cudaError_t keys(CUtensorMap& map, const Tensor& tensor, int64_t dim, int rows) const {
    int64_t const heads = problem.heads_q / problem.group;
    return encode(map, tensor, problem.keys, problem.batch, heads, dim, rows);
  }

 private:
  static constexpr int kElementBytes = sizeof(*Tensor::data);
  // The driver rejects dimensions of 0; kernels load nothing from such a tensor.
  static cuuint64_t size(int64_t count) { return static_cast<cuuint64_t>(count > 0 ? count : 1); }
  static cuuint64_t bytes(int64_t stride) {
    return static_cast<cuuint64_t>(stride * kElementBytes);
  }

  cudaError_t encode(CUtensorMap& map, const Tensor& tensor, const Sequences& sequences,
                     int64_t batch, int64_t heads, int64_t dim, int rows) const {
    bool const varlen = sequences.offsets != nullptr;
    int64_t const seqlen = varlen ? sequences.total : sequences.seqlen;
    if (varlen) batch = 1;
    if (clipped) {
      return encode_clipped_map(map, type, tensor, seqlen, heads, batch, dim, rows);
    }
    cuuint64_t const dims[4] = {size(dim), size(seqlen), size(heads), size(batch)};
    cuuint64_t const strides[3] = {bytes(tensor.seq_stride), bytes(tensor.head_stride),
                                   bytes(tensor.batch_stride)};
    cuuint32_t const box[4] = {128 / kElementBytes, static_cast<cuuint32_t>(rows), 1, 1};
    return encode_tensor_map(map, type, 4, tensor.data, dims, strides, box);
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
