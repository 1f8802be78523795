/* The whole C ABI of a flashvar binary.
 *
 * A binary knows neither Python nor torch. Callers fill one plain struct per op, name the device
 * and the stream explicitly, and get a status back; the message of the last failure is kept per
 * thread. Structs grow only at the end, by fields whose 0 means "as before": `struct_size` tells
 * the library how much the caller knows. The layout is frozen by layout_check.cc; any other change
 * of it means a new FLASHVAR_ABI_VERSION.
 */
#ifndef FLASHVAR_H
#define FLASHVAR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHVAR_ABI_VERSION 1u
#define FLASHVAR_API __attribute__((visibility("default")))

typedef enum flashvar_status {
  FLASHVAR_OK = 0,
  FLASHVAR_INVALID_ARGUMENT = 1, /* the parameters contradict each other or this header */
  FLASHVAR_NO_KERNEL = 2,        /* nothing compiled into this binary serves the request */
  FLASHVAR_CUDA_ERROR = 3        /* the driver or the runtime refused; the message has its words */
} flashvar_status;

typedef enum flashvar_dtype { FLASHVAR_BF16 = 0, FLASHVAR_FP16 = 1 } flashvar_dtype;

/* A 4-D tensor [batch, sequence, heads, head_dim] in device memory. Strides are in elements and may
 * be 0; the head_dim stride is 1. */
typedef struct flashvar_tensor {
  void* data;
  int64_t batch_stride;
  int64_t seq_stride;
  int64_t head_stride;
} flashvar_tensor;

/* Bits of `flags` of the attention ops. With d = seqlen_k - seqlen_q of the sequence, the diagonal
 * of query i is key i + d: the last query's is the last key. */
enum {
  FLASHVAR_CAUSAL = 1u,       /* as a right window of 0: hides keys after the diagonal */
  FLASHVAR_WINDOW_LEFT = 2u,  /* hides keys before i + d - window_left */
  FLASHVAR_WINDOW_RIGHT = 4u, /* hides keys after i + d + window_right */
  FLASHVAR_DETERMINISTIC = 8u /* backward only: the same bits on every run */
};

/* What attention may do beyond softmax(scale q k^T) v; all zeros: none of it. A score becomes
 *   s = scale * (q . k);  s = softcap * tanh(s / softcap);  s += bias - slope * |i + d - j|;  mask.
 */
typedef struct flashvar_attention_features {
  /* Packed sequences. With cu_seqlens_q, q and out (and their gradients) are [total_q, heads_q,
   * dim], sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], batch strides are ignored, lse
   * is [heads_q, total_q] and seqlen_q is an upper bound of the lengths. Likewise k and v with
   * cu_seqlens_k. Offsets outside of [0, total] are clamped, and a sequence that would end before
   * it starts is empty. */
  const int32_t* cu_seqlens_q; /* [batch + 1] or NULL */
  const int32_t* cu_seqlens_k; /* [batch + 1] or NULL */
  const int32_t* seqused_k;    /* [batch] or NULL: only so many keys of sequence b exist */
  int64_t total_q;
  int64_t total_k;
  const float* alibi_slopes;  /* [batch, heads_q] or NULL; contiguous heads */
  int64_t alibi_batch_stride; /* elements, may be 0 */
  flashvar_tensor bias; /* [batch, seqlen_q, heads_q, seqlen_k]: its seq_stride is that of queries,
                           keys are contiguous; data may be NULL; not with packed sequences */
  const int64_t* rng;   /* [2], seed and offset of the dropout mask; NULL iff dropout_p is 0 */
  float dropout_p;      /* [0, 1): probability, in steps of 2^-16, that a weight becomes 0 */
  float softcap;        /* 0: none; not negative */
  int32_t window_left;  /* not negative; counts with its flag */
  int32_t window_right; /* likewise */
  int32_t head_dim_v;   /* of v, out and their gradients, like head_dim; 0: head_dim */
  uint32_t bias_dtype;  /* 0: that of q; 1: fp32 */
} flashvar_attention_features;

typedef struct flashvar_attention_fwd_params {
  uint32_t struct_size; /* sizeof(flashvar_attention_fwd_params) as the caller compiled it */
  uint32_t abi_version; /* FLASHVAR_ABI_VERSION as the caller compiled it */
  int32_t device;       /* CUDA device ordinal that owns every pointer below */
  uint32_t dtype;       /* flashvar_dtype of q, k, v and out */
  void* stream;         /* cudaStream_t of that device; NULL is the legacy default stream */
  flashvar_tensor q;    /* [batch, seqlen_q, heads_q, head_dim] */
  flashvar_tensor k;    /* [batch, seqlen_k, heads_kv, head_dim] */
  flashvar_tensor v;    /* [batch, seqlen_k, heads_kv, head_dim_v] */
  flashvar_tensor out;  /* [batch, seqlen_q, heads_q, head_dim_v], written; no two elements alias */
  float* lse; /* [batch, heads_q, seqlen_q] contiguous, natural log, written; may be NULL */
  int64_t batch;
  int64_t seqlen_q;
  int64_t seqlen_k;
  int32_t heads_q; /* a multiple of heads_kv: query head h reads kv head h / (heads_q / heads_kv) */
  int32_t heads_kv;
  int32_t head_dim; /* a multiple of 8, 8 to 256 */
  uint32_t flags;
  float scale;       /* multiplies q . k before the softmax; any finite value */
  uint32_t reserved; /* 0 */
  flashvar_attention_features features;
  uint32_t* counter; /* 4 bytes of the device, whose contents are lost, or NULL: with it tiles of
                        packed sequences go to whoever is free, without it in a fixed order */
} flashvar_attention_fwd_params;

typedef struct flashvar_attention_bwd_params {
  uint32_t struct_size; /* sizeof(flashvar_attention_bwd_params) as the caller compiled it */
  uint32_t abi_version; /* FLASHVAR_ABI_VERSION as the caller compiled it */
  int32_t device;       /* CUDA device ordinal that owns every pointer below */
  uint32_t dtype;       /* flashvar_dtype of the tensors */
  void* stream;         /* cudaStream_t of that device; NULL is the legacy default stream */
  flashvar_tensor q;    /* q, k, v and out: what the forward read and wrote */
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
  void* workspace;         /* flashvar_attention_bwd_workspace bytes, 256-byte aligned; contents are
                              lost; may be NULL where that is 0 */
  uint64_t workspace_size; /* bytes */
  int64_t batch;           /* from here on as in flashvar_attention_fwd_params */
  int64_t seqlen_q;
  int64_t seqlen_k;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t head_dim;
  uint32_t flags;
  float scale;
  uint32_t reserved;
  flashvar_attention_features features;
} flashvar_attention_bwd_params;

/* FLASHVAR_ABI_VERSION as the library was compiled. */
FLASHVAR_API uint32_t flashvar_abi_version(void);

/* JSON object of the binary: {"architecture": "sm_80", "version": "0.1.0", "source_hash": "..."}.
 */
FLASHVAR_API const char* flashvar_build_info(void);

/* Message of the last failed call on this thread; "" when none failed yet. Never NULL. */
FLASHVAR_API const char* flashvar_last_error(void);

/* out = softmax(scale * q k^T + mask) v and its log-sum-exp. Rows that see no key give out 0 and
 * lse -inf, and so do packed rows before the first sequence and after the last. Enqueues on
 * `stream` and returns; empty problems return without a launch where there is nothing to write. */
FLASHVAR_API flashvar_status flashvar_attention_fwd(const flashvar_attention_fwd_params* params);

/* The gradients of flashvar_attention_fwd, also through its log-sum-exp. Enqueues on `stream` and
 * returns. */
FLASHVAR_API flashvar_status flashvar_attention_bwd(const flashvar_attention_bwd_params* params);

/* Writes to `size` the bytes of workspace that a call wants: a function of sizes, strides, flags
 * and features; addresses are not looked at beyond being NULL. */
FLASHVAR_API flashvar_status
flashvar_attention_bwd_workspace(const flashvar_attention_bwd_params* params, uint64_t* size);

#ifdef __cplusplus
}
#endif

#endif /* FLASHVAR_H */
