/* The C ABI of the gated delta rule: the functions gated_delta_rule_fwd, gated_delta_rule_bwd and
 * gated_delta_rule_update. */
#ifndef FLASHVAR_GATED_DELTA_RULE_H
#define FLASHVAR_GATED_DELTA_RULE_H

#include "flashvar.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bits of `flags`. */
enum {
  FLASHVAR_QK_L2NORM = 1u,       /* q and k are divided by sqrt(sum of squares + 1e-6) */
  FLASHVAR_BETA_SIGMOID = 2u,    /* beta is sigmoid(beta) */
  FLASHVAR_NEGATIVE_EIGVAL = 4u, /* beta is doubled, after the sigmoid */
};

/* A value for each token and head [batch, seqlen, heads], or for each head [heads]: the other
 * strides are 0. Strides in elements. */
typedef struct flashvar_gate {
  const void* data; /* may be NULL where the op's header says so */
  int64_t batch_stride;
  int64_t seq_stride;
  int64_t head_stride;
  uint32_t dtype;    /* flashvar_dtype */
  uint32_t reserved; /* 0 */
} flashvar_gate;

/* A head has a state S [head_dim, head_dim_v]. For each token of a sequence, in order,
 *   S = exp(g) S;  S += k (beta (v - S^T k))^T;  out = scale S^T q.
 * Head h of v goes with head h / (heads / heads_qk) of q and k.
 *
 * Varlen: with cu_seqlens tensors are [seqlen, heads, dim] and sequence i is rows cu_seqlens[i] to
 * cu_seqlens[i + 1]; offsets outside [0, seqlen] are clamped, and a sequence whose end would
 * precede its start is empty. */
typedef struct flashvar_gated_delta_rule_problem {
  int64_t sequences; /* the batch; varlen: the number of sequences */
  int64_t seqlen;    /* of every sequence; varlen: rows of all sequences */
  int32_t heads_qk;
  int32_t heads;      /* of v, the gates, out and the states: a multiple of heads_qk */
  int32_t head_dim;   /* of q and k: a multiple of 8, unless a function says otherwise */
  int32_t head_dim_v; /* likewise */
  uint32_t dtype;     /* flashvar_dtype of q, k, v and out */
  uint32_t flags;
  float scale;
  uint32_t reserved;         /* 0 */
  const int32_t* cu_seqlens; /* [sequences + 1] or NULL */
  flashvar_tensor q;         /* rows start at multiples of 16 bytes, as in k and v */
  flashvar_tensor k;
  flashvar_tensor v;
  flashvar_gate g;       /* natural logarithms, at most 0, -inf too; data may be NULL: zeros */
  flashvar_gate beta;    /* 0 to 2 */
  flashvar_gate a_log;   /* [heads] or NULL: g is -exp(a_log) softplus(g + dt_bias) */
  flashvar_gate dt_bias; /* [heads] or NULL, beside a_log alone */
  flashvar_state initial_state; /* data may be NULL: zeros */
} flashvar_gated_delta_rule_problem;

typedef struct flashvar_gated_delta_rule_fwd_params {
  flashvar_call call;
  flashvar_tensor out; /* like v, rows start at multiples of 16 bytes; written. Varlen: rows of no
                          sequence stay as they are */
  flashvar_state final_state; /* written; data may be NULL: not wanted */
  flashvar_gated_delta_rule_problem problem;
} flashvar_gated_delta_rule_fwd_params;

/* Out and the state after each sequence, by chunks of 64 tokens: the same bits on every run.
 * initial_state and final_state must not overlap in memory.
 * Enqueues on the stream and returns; empty problems return without a launch. */
FLASHVAR_API flashvar_status
flashvar_gated_delta_rule_fwd(const flashvar_gated_delta_rule_fwd_params* params);

/* Writes to `size` the bytes of workspace that a call needs: about 13 KiB a chunk and head, and up
 * to as much again for the segments of long sequences of few heads. */
FLASHVAR_API flashvar_status flashvar_gated_delta_rule_fwd_workspace(
    const flashvar_gated_delta_rule_fwd_params* params, uint64_t* size);

/* Writes to `text`, of `size` bytes, which kernels a call would launch and why. Truncated to fit,
 * terminated by 0. */
FLASHVAR_API flashvar_status flashvar_gated_delta_rule_fwd_explain(
    const flashvar_gated_delta_rule_fwd_params* params, char* text, uint64_t size);

/* A flashvar_gate that is written. */
typedef struct flashvar_grad_gate {
  void* data; /* may be NULL where the op's header says so */
  int64_t batch_stride;
  int64_t seq_stride;
  int64_t head_stride;
  uint32_t dtype;    /* flashvar_dtype */
  uint32_t reserved; /* 0 */
} flashvar_grad_gate;

/* The gradients of a forward's inputs, from those of its results. */
typedef struct flashvar_gated_delta_rule_bwd_params {
  flashvar_call call;
  flashvar_tensor grad_out;        /* like v, rows start at multiples of 16 bytes */
  flashvar_state grad_final_state; /* data may be NULL: zeros */
  flashvar_tensor grad_q; /* these three like q, k and v, rows start at multiples of 16 bytes;
                             written. Varlen: rows of no sequence stay as they are */
  flashvar_tensor grad_k;
  flashvar_tensor grad_v;
  flashvar_grad_gate grad_g;         /* like g, written; data may be NULL: not wanted */
  flashvar_grad_gate grad_beta;      /* like beta, written; required if there are rows */
  flashvar_grad_gate grad_a_log;     /* [heads]; written. data may be NULL: not wanted, as in the
                                        next two */
  flashvar_grad_gate grad_dt_bias;   /* [heads]; written */
  flashvar_state grad_initial_state; /* written */
  flashvar_gated_delta_rule_problem problem;
} flashvar_gated_delta_rule_bwd_params;

/* By chunks of 64 tokens: the same bits on every run. Enqueues on the stream and returns; empty
 * problems return without a launch. */
FLASHVAR_API flashvar_status
flashvar_gated_delta_rule_bwd(const flashvar_gated_delta_rule_bwd_params* params);

/* About 133 KiB a chunk and head for head dims 128 and 128, more with segments. */
FLASHVAR_API flashvar_status flashvar_gated_delta_rule_bwd_workspace(
    const flashvar_gated_delta_rule_bwd_params* params, uint64_t* size);

FLASHVAR_API flashvar_status flashvar_gated_delta_rule_bwd_explain(
    const flashvar_gated_delta_rule_bwd_params* params, char* text, uint64_t size);

/* Out and the states after each sequence, token by token: for decoding. The problem's rows may
 * start anywhere, and its head dims are any from 1. In place where final_state is
 * problem.initial_state.
 *
 * With state_indices, sequence i has state state_indices[i] of both tensors of states. An index
 * outside of 0 to states - 1 stands for zeros, and nothing is written for it. No two sequences may
 * name one state: which of them is written last is undefined. */
typedef struct flashvar_gated_delta_rule_update_params {
  flashvar_call call;
  flashvar_tensor out;        /* like v; written. Varlen: rows of no sequence stay as they are */
  flashvar_state final_state; /* of state_dtype; written; data may be NULL: not wanted */
  flashvar_gated_delta_rule_problem problem; /* initial_state: of state_dtype */
  const void* state_indices;                 /* [sequences] or NULL: sequence i has state i */
  int64_t state_index_stride;
  int64_t states;       /* of a tensor of states, with state_indices */
  uint32_t state_dtype; /* flashvar_dtype: FLASHVAR_FP32 or that of the problem */
  uint32_t index_bytes; /* of an index, a signed integer: 4 or 8; 0 without state_indices */
} flashvar_gated_delta_rule_update_params;

/* The same bits on every run. Enqueues on the stream and returns; empty problems return without a
 * launch. Needs no workspace. */
FLASHVAR_API flashvar_status
flashvar_gated_delta_rule_update(const flashvar_gated_delta_rule_update_params* params);

FLASHVAR_API flashvar_status flashvar_gated_delta_rule_update_workspace(
    const flashvar_gated_delta_rule_update_params* params, uint64_t* size);

FLASHVAR_API flashvar_status flashvar_gated_delta_rule_update_explain(
    const flashvar_gated_delta_rule_update_params* params, char* text, uint64_t size);

#ifdef __cplusplus
}
#endif

#endif /* FLASHVAR_GATED_DELTA_RULE_H */
