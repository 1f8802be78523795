// An attention call as kernels see it: parameters validated and converted by
// abi/attention_problem.h.
#pragma once
#include <cstdint>

#include "core/ceil_div.h"
#include "core/sequences.cuh"
#include "core/tensor_view.h"

namespace flashvar::attention {

inline constexpr int32_t kUnbounded = 0x7fffffff;  // a window without a bound

using Tensor = TensorView<uint16_t>;  // bf16 or fp16; varlen: batch stride 0

// The bias, [batch, heads_q, seqlen_q, seqlen_k] with contiguous keys. Strides are in elements, 0
// where the bias is broadcast.
struct BiasView {
  void* data;  // null: no bias
  int64_t batch_stride;
  int64_t head_stride;
  int64_t query_stride;

  // The largest of 16, 4 and 2 bytes of which the addresses of all rows are multiples.
  int32_t alignment(int64_t element_bytes) const {
    uint64_t const all =
        reinterpret_cast<uintptr_t>(data) |
        static_cast<uint64_t>((batch_stride | head_stride | query_stride) * element_bytes);
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
  }
};

// Score modifiers: operations on q . k before the mask, and dropout, applied to P after the
// softmax. Kernels compiled with kModifiers evaluate them; the others need the scale alone.
struct ScoreModifiers {
  float scale;                 // of q . k; may be negative or 0
  float softcap;               // largest magnitude of a capped score; 0: none
  float softcap_exponent;      // 2 log2(e) / softcap (Softcap)
  const float* alibi_slopes;   // [batch, heads_q], or null
  int64_t alibi_batch_stride;  // elements
  BiasView bias;               // of q's dtype, or fp32
  int32_t bias_is_fp32;
  int32_t bias_alignment;      // BiasView::alignment()
  const int64_t* rng;          // [2], seed and offset of Philox; null: no dropout
  uint32_t dropout_threshold;  // kept: elements whose 16 random bits << 16 are at least this
  float dropout_scale;         // 1 / (1 - dropout probability), of the kept elements

  // Whether a score is anything else than scale * (q . k).
  __host__ __device__ bool modifies_scores() const {
    return softcap != 0.f || alibi_slopes != nullptr || bias.data != nullptr;
  }
};

// The forward's split-KV (key_splits.h) and PackGQA (pack_gqa.h).
//
// Split-KV: `count` blocks have a query tile, each with a split, a range of its key blocks. Their
// results go to the workspace, in fp32, for fwd_merge_kernel. A "split head" is numbered
// head * count + split.
struct KeySplits {
  int32_t count = 1;
  // [batch, split heads, seqlen_q, head_dim_v], or [split heads, total_q, head_dim_v]. Null: there
  // is one split, or the splits of a tile are a cluster, and the kernel stores the results of the
  // call.
  float* out = nullptr;
  float* lse = nullptr;  // likewise, without the last dimension
  // PackGQA: the rows of a query, one for each member of its group, a query head. With one query
  // per sequence the problem is dense, and query_offsets are those of the call's varlen queries, or
  // null. With several it may stay varlen: then queries.seqlen is in rows, all else in queries.
  int32_t group_rows = 1;
  const int32_t* query_offsets = nullptr;
  // With several queries per sequence group_rows is 1 << row_shift: row r belongs to query
  // r >> row_shift and to member r % group_rows of the group, or to none if there are fewer
  // members.
  int32_t row_shift = 0;
  int32_t members = 1;
  int64_t member_stride = 0;  // of q, in elements
};

// The part of a problem that forward and backward share.
struct Problem {
  Tensor q, k, v, out;
  float* lse;  // natural log, [batch, heads_q, seqlen_q]; varlen: [heads_q, total_q]
  int64_t batch;
  Sequences queries, keys;
  const int32_t* seqused_k;  // [batch]: each sequence's first keys that are in use; null: all
  int32_t heads_q;
  int32_t group;  // query heads per kv head
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t window_left, window_right;  // visible keys before and after the diagonal, or kUnbounded
  // Kernels without modifiers compute the softmax of score_sign * (q . k) with the positive scale
  // |scale|: the online softmax needs the largest score to be the largest scaled score, whatever
  // the sign of the caller's scale. score_sign is 0 where the scale is 0.
  float score_sign;
  float scale_log2;  // |scale| * log2(e), or log2(e) where score_sign is 0
  ScoreModifiers modifiers;
  KeySplits splits = {};  // the forward's

  bool has_modifiers() const { return modifiers.modifies_scores() || modifiers.rng != nullptr; }

  // Whether every sequence has one tile of `block_kv` keys.
  bool has_one_key_tile(int32_t block_kv) const { return keys.seqlen <= block_kv; }

  bool is_varlen() const { return queries.offsets != nullptr || keys.offsets != nullptr; }

  // Whether tensors may hold other data than zeros after the last key in use of a sequence.
  __host__ __device__ bool has_foreign_tail() const {
    return keys.offsets != nullptr || seqused_k != nullptr;
  }

  bool rows_are_aligned() const {
    return flashvar::rows_are_aligned(q) && flashvar::rows_are_aligned(k) &&
           flashvar::rows_are_aligned(v) && flashvar::rows_are_aligned(out);
  }

#ifdef __CUDACC__
  // The keys of a sequence that are in use.
  __device__ __forceinline__ Span keys_in_use(uint32_t batch) const {
    return keys_in_use(batch, keys.span(batch));
  }
  // `span`: all of its keys.
  __device__ __forceinline__ Span keys_in_use(uint32_t batch, Span span) const {
    if (seqused_k != nullptr) span.count = min(max(seqused_k[batch], 0), span.count);
    return span;
  }

  // The row of a sequence's first query in the log-sum-exp. `first`: its row in q's sequence
  // dimension.
  __device__ __forceinline__ int64_t lse_row(uint32_t batch, uint32_t head, int32_t first) const {
    return queries.offsets != nullptr ? int64_t{head} * queries.total + first
                                      : (int64_t{batch} * heads_q + head) * queries.seqlen;
  }

  // The index of a sequence's queries in the batch dimension of q: varlen tensors have one, 0.
  // Offsets are clamped, as by Sequences.
  __device__ __forceinline__ uint32_t batch_of_queries(uint32_t batch) const {
    if (queries.offsets != nullptr) return 0;
    if (splits.query_offsets == nullptr) return batch;
    return min(max(splits.query_offsets[batch], 0), queries.total - 1);
  }
#endif
};

// Attention sinks, [heads_q]: one more score of each row, natural log (add_sink).
struct SinksView {
  const void* data;  // null: no sinks
  uint32_t dtype;    // kAbi of a dtype
};

// The forward: `lse` may be null.
struct FwdProblem : Problem {
  unsigned char* workspace;
  SinksView sinks;
};

// The backward: `lse` is what the forward wrote.
struct BwdProblem : Problem {
  Tensor grad_out, grad_q, grad_k, grad_v;
  BiasView grad_bias;     // fp32, added to; data may be null
  const float* grad_lse;  // gradient of lse, laid out like it; may be null
  float* delta_out;       // delta for the caller, laid out like lse, written; may be null
  unsigned char* workspace;
  bool deterministic;  // no atomic sums: the same bits on every run

  // The most query blocks of one head that see a key tile.
  int64_t visible_query_blocks(int32_t block_q, int32_t block_kv) const {
    int64_t visible = queries.seqlen;
    if (window_left != kUnbounded && window_right != kUnbounded) {
      int64_t const window = int64_t{window_left} + window_right + block_kv;
      if (window < visible) visible = window;
    }
    return ceil_div(visible, block_q);
  }

  bool rows_are_aligned() const {
    return Problem::rows_are_aligned() && flashvar::rows_are_aligned(grad_out) &&
           flashvar::rows_are_aligned(grad_q) && flashvar::rows_are_aligned(grad_k) &&
           flashvar::rows_are_aligned(grad_v);
  }
};

}  // namespace flashvar::attention
