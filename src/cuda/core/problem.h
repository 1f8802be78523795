// The problem as kernels see it: checked by abi/, with nothing left to decide but the tile.
#pragma once
#include <cstdint>

#include "core/sequences.cuh"

namespace flashvar {

inline constexpr int32_t kUnbounded = 0x7fffffff;  // of a window

// [batch, sequence, heads, head_dim], 16-bit elements, head_dim contiguous; strides in elements.
// Packed sequences have batch stride 0.
struct TensorView {
  uint16_t* data;
  int64_t batch_stride;
  int64_t seq_stride;
  int64_t head_stride;
};

// [batch, heads_q, seqlen_q, seqlen_k], keys contiguous; strides in elements, 0 where broadcast.
struct BiasView {
  void* data;  // null: none
  int64_t batch_stride;
  int64_t head_stride;
  int64_t query_stride;
};

// What becomes of a score between q . k and the mask, and of a weight after the softmax. Evaluated
// by the kernels that are compiled with kFeatures alone.
struct ScoreFeatures {
  float scale;                 // of q . k, with its sign
  float softcap;               // 0: none
  float softcap_exponent;      // 2 log2(e) / softcap
  const float* alibi_slopes;   // [batch, heads_q] or null
  int64_t alibi_batch_stride;  // elements
  BiasView bias;               // of q's dtype, or fp32
  int32_t bias_is_fp32;
  const int64_t* rng;          // seed and offset; null: no dropout
  uint32_t dropout_threshold;  // a weight is kept where its half word, times 2^16, is at least this
  float dropout_scale;         // of the weights that are kept

  // Whether scores are more than scale (q . k).
  __host__ __device__ bool modify() const {
    return softcap != 0.f || alibi_slopes != nullptr || bias.data != nullptr;
  }
};

// Whether every row of a tensor starts on 16 bytes.
inline bool rows_are_aligned(const TensorView& tensor) {
  int64_t const strides = tensor.batch_stride | tensor.seq_stride | tensor.head_stride;
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && strides % 8 == 0;
}

// What forward and backward share.
struct AttentionProblem {
  TensorView q, k, v, out;
  float* lse;  // [batch, heads_q, seqlen_q], or [heads_q, total_q] of packed sequences
  int64_t batch;
  Sequences queries, keys;
  const int32_t* seqused_k;  // [batch] or null
  int32_t heads_q;
  int32_t group;  // query heads per kv head
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t window_left, window_right;  // kUnbounded, or how far from the diagonal a query sees
  // Without features the softmax works on score_sign * (q . k) with a positive scale, so that a
  // row's maximum is the maximum of the scaled scores whatever the caller's scale. score_sign is 0
  // for a scale of 0.
  float score_sign;
  float scale_log2;  // |scale| * log2(e), or log2(e) when score_sign is 0
  ScoreFeatures features;

  bool has_features() const { return features.modify() || features.rng != nullptr; }

  bool rows_are_aligned() const {
    return flashvar::rows_are_aligned(q) && flashvar::rows_are_aligned(k) &&
           flashvar::rows_are_aligned(v) && flashvar::rows_are_aligned(out);
  }
};

// lse may be null.
struct AttentionFwdProblem : AttentionProblem {
  uint32_t* counter;  // in device memory, to be used as the kernel likes; null: there is none
};

struct AttentionBwdProblem : AttentionProblem {
  TensorView grad_out, grad_q, grad_k, grad_v;
  BiasView grad_bias;     // fp32, added to; data may be null
  const float* grad_lse;  // like lse, or null
  unsigned char* workspace;
  bool deterministic;

  bool rows_are_aligned() const {
    return AttentionProblem::rows_are_aligned() && flashvar::rows_are_aligned(grad_out) &&
           flashvar::rows_are_aligned(grad_q) && flashvar::rows_are_aligned(grad_k) &&
           flashvar::rows_are_aligned(grad_v);
  }
};

}  // namespace flashvar
