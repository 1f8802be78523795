// The problem as kernels see it: checked by abi/, with nothing left to decide but the tile.
#pragma once
#include <cstdint>

namespace flashvar {

// [batch, sequence, heads, head_dim], 16-bit elements, head_dim contiguous; strides in elements.
struct TensorView {
  uint16_t* data;
  int64_t batch_stride;
  int64_t seq_stride;
  int64_t head_stride;
};

struct AttentionFwdProblem {
  TensorView q, k, v, out;
  float* lse;  // [batch, heads_q, seqlen_q] or null
  int64_t batch;
  int32_t seqlen_q, seqlen_k;
  int32_t heads_q;
  int32_t group;  // query heads per kv head
  int32_t head_dim;
  int32_t causal;
  // The softmax works on score_sign * (q . k) with a positive scale, so that a row's maximum is the
  // maximum of the scaled scores whatever the caller's scale. score_sign is 0 for a scale of 0.
  float score_sign;
  float scale_log2;  // |scale| * log2(e), or log2(e) when score_sign is 0
};

}  // namespace flashvar
