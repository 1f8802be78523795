/* The C ABI of attention: the functions attention_fwd and attention_bwd. */
#ifndef FLASHVAR_ATTENTION_H
#define FLASHVAR_ATTENTION_H

#include "flashvar.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bits of `flags`. The diagonal of query i is key i + d, with d = seqlen_k - seqlen_q of the
 * sequence: the diagonal of the last query is the last key. */
enum {
  FLASHVAR_CAUSAL = 1u,       /* hides keys after the diagonal, as a right window of 0 does */
  FLASHVAR_WINDOW_LEFT = 2u,  /* hides keys before i + d - window_left */
  FLASHVAR_WINDOW_RIGHT = 4u, /* hides keys after i + d + window_right */
  FLASHVAR_DETERMINISTIC = 8u /* backward only: the same bits on every run */
};

/* Fields of forward and backward. A score is
 *   s = scale * (q . k);  s = softcap * tanh(s / softcap);  s += bias - slope * |i + d - j|;  mask.
 * P is exp(s) / (sum of exp(s) + exp(sink)); without sinks, exp(sink) is 0.
 *
 * Varlen: with cu_seqlens_q, tensors with query rows are [total_q, heads_q, dim], sequence b is
 * rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], batch strides are ignored, lse is [heads_q, total_q]
 * and seqlen_q is an upper bound of the lengths: with a smaller one results are wrong. Likewise k
 * and v with cu_seqlens_k. Offsets outside [0, total] are clamped; a sequence whose end would
 * precede its start is empty. */
typedef struct flashvar_attention_problem {
  int64_t batch;
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t total_q; /* varlen: rows of q */
  int64_t total_k; /* varlen: rows of k and v */
  int32_t heads_q; /* a multiple of heads_kv: query head h reads kv head h / (heads_q / heads_kv) */
  int32_t heads_kv;
  int32_t head_dim;   /* of q and k: a multiple of 8, 8 to 256 */
  int32_t head_dim_v; /* of v and out, likewise; 0: head_dim */
  uint32_t dtype;     /* flashvar_dtype of q, k, v, out and their gradients */
  uint32_t flags;
  float scale;          /* multiplies q . k before the softmax; any finite value */
  float softcap;        /* 0: none; not negative */
  int32_t window_left;  /* not negative; read only with its flag */
  int32_t window_right; /* likewise */
  float dropout_p;      /* [0, 1): probability, in steps of 2^-16, that an element of P becomes 0 */
  uint32_t bias_dtype;  /* 0: that of q; 1: fp32 */
  const int32_t* cu_seqlens_q; /* [batch + 1] or NULL */
  const int32_t* cu_seqlens_k; /* [batch + 1] or NULL */
  const int32_t* seqused_k; /* [batch] or NULL: number of keys in use, the first of each sequence */
  const float* alibi_slopes;  /* [batch, heads_q] or NULL; contiguous heads */
  int64_t alibi_batch_stride; /* elements, may be 0 */
  const int64_t* rng;   /* [2], seed and offset of the dropout mask; NULL iff dropout_p is 0 */
  flashvar_tensor bias; /* [batch, seqlen_q, heads_q, seqlen_k]: its seq_stride is that of queries,
                           keys are contiguous; data may be NULL; not with varlen */
  const void* sinks; /* [heads_q] contiguous, or NULL: one more score of each row of a head, natural
                        log, not scaled, of a key without a value */
  float* delta; /* backward only: like lse, written: rowsum(grad_out o out) - grad_lse, or 0 where
                   lse is -inf; rows of no sequence are left as they are; may be NULL */
  uint32_t sinks_dtype; /* flashvar_dtype of sinks */
  uint32_t reserved;    /* 0 */
} flashvar_attention_problem;

typedef struct flashvar_attention_fwd_params {
  flashvar_call call;
  flashvar_tensor q;   /* [batch, seqlen_q, heads_q, head_dim] */
  flashvar_tensor k;   /* [batch, seqlen_k, heads_kv, head_dim] */
  flashvar_tensor v;   /* [batch, seqlen_k, heads_kv, head_dim_v] */
  flashvar_tensor out; /* [batch, seqlen_q, heads_q, head_dim_v], written; no two elements alias */
  float* lse; /* [batch, heads_q, seqlen_q] contiguous, natural log, written; may be NULL */
  flashvar_attention_problem problem;
} flashvar_attention_fwd_params;

typedef struct flashvar_attention_bwd_params {
  flashvar_call call;
  flashvar_tensor q; /* q, k, v and out: what the forward read and wrote */
  flashvar_tensor k;
  flashvar_tensor v;
  flashvar_tensor out;
  flashvar_tensor grad_out;  /* like out */
  flashvar_tensor grad_q;    /* like q, written; no two elements alias */
  flashvar_tensor grad_k;    /* like k, written */
  flashvar_tensor grad_v;    /* like v, written */
  flashvar_tensor grad_bias; /* fp32, strides as of bias, added to (a stride of 0 sums over its
                                dimension); data may be NULL */
  const float* lse;          /* what the forward wrote */
  const float* grad_lse;     /* like lse; may be NULL */
  flashvar_attention_problem problem; /* as in the forward */
} flashvar_attention_bwd_params;

/* out = softmax(scores) v and its log-sum-exp, which includes the sink. Rows that see no key give
 * out 0 and lse -inf, or with sinks their sink; varlen rows before the first sequence and after the
 * last give 0 and -inf. Enqueues on the stream and returns; where there is nothing to write it
 * returns without a launch. */
FLASHVAR_API flashvar_status flashvar_attention_fwd(const flashvar_attention_fwd_params* params);

/* The gradients of flashvar_attention_fwd, also through its log-sum-exp. That of a sink is the sum
 * of -exp(sink - lse) * delta over the rows of its head. Enqueues on the stream and returns. */
FLASHVAR_API flashvar_status flashvar_attention_bwd(const flashvar_attention_bwd_params* params);

/* Writes to `size` the bytes of workspace that a call needs. They depend on sizes, strides, flags
 * and on which pointers are NULL, on nothing else. */
FLASHVAR_API flashvar_status
flashvar_attention_fwd_workspace(const flashvar_attention_fwd_params* params, uint64_t* size);
FLASHVAR_API flashvar_status
flashvar_attention_bwd_workspace(const flashvar_attention_bwd_params* params, uint64_t* size);

/* Writes to `text`, of `size` bytes, which kernels a call would launch and why: "wgmma: ..." or
 * "mma.sync: ...". Truncated to fit, terminated by 0. */
FLASHVAR_API flashvar_status flashvar_attention_fwd_explain(
    const flashvar_attention_fwd_params* params, char* text, uint64_t size);
FLASHVAR_API flashvar_status flashvar_attention_bwd_explain(
    const flashvar_attention_bwd_params* params, char* text, uint64_t size);

#ifdef __cplusplus
}
#endif

#endif /* FLASHVAR_ATTENTION_H */
