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

/* Bits of flashvar_attention_fwd_params.flags. */
enum {
  FLASHVAR_CAUSAL = 1u /* key j is visible to query i iff j <= i + seqlen_k - seqlen_q */
};

typedef struct flashvar_attention_fwd_params {
  uint32_t struct_size; /* sizeof(flashvar_attention_fwd_params) as the caller compiled it */
  uint32_t abi_version; /* FLASHVAR_ABI_VERSION as the caller compiled it */
  int32_t device;       /* CUDA device ordinal that owns every pointer below */
  uint32_t dtype;       /* flashvar_dtype of q, k, v and out */
  void* stream;         /* cudaStream_t of that device; NULL is the legacy default stream */
  flashvar_tensor q;    /* [batch, seqlen_q, heads_q, head_dim] */
  flashvar_tensor k;    /* [batch, seqlen_k, heads_kv, head_dim] */
  flashvar_tensor v;    /* [batch, seqlen_k, heads_kv, head_dim] */
  flashvar_tensor out;  /* [batch, seqlen_q, heads_q, head_dim], written; no two elements alias */
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
} flashvar_attention_fwd_params;

/* FLASHVAR_ABI_VERSION as the library was compiled. */
FLASHVAR_API uint32_t flashvar_abi_version(void);

/* JSON object of the binary: {"architecture": "sm_80", "version": "0.1.0", "source_hash": "..."}.
 */
FLASHVAR_API const char* flashvar_build_info(void);

/* Message of the last failed call on this thread; "" when none failed yet. Never NULL. */
FLASHVAR_API const char* flashvar_last_error(void);

/* out = softmax(scale * q k^T + mask) v and its log-sum-exp. Rows that see no key give out 0 and
 * lse -inf. Enqueues on `stream` and returns; empty problems return without a launch where there is
 * nothing to write. */
FLASHVAR_API flashvar_status flashvar_attention_fwd(const flashvar_attention_fwd_params* params);

#ifdef __cplusplus
}
#endif

#endif /* FLASHVAR_H */
