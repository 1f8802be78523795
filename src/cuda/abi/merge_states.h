/* The C ABI of merge_states: the functions merge_states_fwd and merge_states_bwd. */
#ifndef FLASHVAR_MERGE_STATES_H
#define FLASHVAR_MERGE_STATES_H

#include "flashvar.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Parts that may be given as addresses: they are held in a kernel's parameters. A stacked tensor
 * may have any number of parts. */
#define FLASHVAR_MERGE_STATES_MAX_ADDRESSES 224

/* Fields of both directions. Part i is the attention over keys of its own: outs[i], of rows
 * [batch, seqlen, heads] with head_dim elements each, and lses[i], the natural log-sum-exp of each
 * row. With lse = log(sum_i exp(lses[i])) and w_i = exp(lses[i] - lse),
 *   out = sum_i w_i outs[i].
 * A part is ignored in a row, whatever its out holds, where its lse is -inf or lower than the row's
 * highest by more than 103.97: the exponential of the difference is 0 in fp32 then. Rows that
 * are -inf in every part give out 0 and lse -inf. A NaN among a row's lses gives out NaN and lse
 * NaN; +inf among them gives out NaN and lse +inf.
 *
 * Varlen tensors [total, heads, head_dim] are a batch of one sequence. */
typedef struct flashvar_merge_states_problem {
  int64_t batch; /* batch and seqlen: below 2^31 */
  int64_t seqlen;
  int32_t heads;
  int32_t head_dim;             /* any, 0 too */
  uint32_t dtype;               /* flashvar_dtype of outs, out and their gradients */
  int32_t parts;                /* at least 1 */
  flashvar_tensor outs;         /* strides of every part, of dtype; data: part 0, where stacked */
  int64_t outs_part_stride;     /* elements from part to part of a stacked tensor */
  const void* const* out_parts; /* [parts] addresses, an array in host memory; NULL: stacked */
  flashvar_tensor lses;         /* likewise, fp32; seq_stride and head_stride may be any */
  int64_t lses_part_stride;
  const void* const* lse_parts; /* [parts] or NULL, as out_parts */
} flashvar_merge_states_problem;

typedef struct flashvar_merge_states_fwd_params {
  flashvar_call call;
  flashvar_tensor out; /* [batch, seqlen, heads, head_dim], written; no two elements alias */
  float* lse;          /* [batch, heads, seqlen] contiguous, written; may be NULL */
  flashvar_merge_states_problem problem;
} flashvar_merge_states_fwd_params;

typedef struct flashvar_merge_states_bwd_params {
  flashvar_call call;
  flashvar_tensor grad_out;  /* like out */
  const float* grad_lse;     /* like lse; may be NULL */
  flashvar_tensor grad_outs; /* stacked like outs, written; no two elements alias; data may be NULL:
                                not wanted */
  int64_t grad_outs_part_stride;
  float* grad_lses; /* [parts, batch, heads, seqlen] contiguous, written; NULL: not wanted */
  flashvar_merge_states_problem problem; /* as in the forward */
  uint64_t skipped_outs; /* bit i: the gradient of outs[i] is not wanted, and grad_outs has no part
                            for it; parts from 64 on are all wanted */
} flashvar_merge_states_bwd_params;

/* The merged out and log-sum-exp, summed in fp32: the same bits on every run. Enqueues on the
 * stream and returns; empty problems return without a launch. */
FLASHVAR_API flashvar_status
flashvar_merge_states_fwd(const flashvar_merge_states_fwd_params* params);

/* The gradients of flashvar_merge_states_fwd:
 *   grad_outs[i] = w_i grad_out
 *   grad_lses[i] = w_i (grad_out . (outs[i] - out) + grad_lse),
 * both 0 where a part is ignored. Without grad_lses outs are not read. */
FLASHVAR_API flashvar_status
flashvar_merge_states_bwd(const flashvar_merge_states_bwd_params* params);

/* Writes to `size` the bytes of workspace that a call needs: 0 so far. */
FLASHVAR_API flashvar_status
flashvar_merge_states_fwd_workspace(const flashvar_merge_states_fwd_params* params, uint64_t* size);
FLASHVAR_API flashvar_status
flashvar_merge_states_bwd_workspace(const flashvar_merge_states_bwd_params* params, uint64_t* size);

/* Writes to `text`, of `size` bytes, how a call would read its rows and why: "simt: ...".
 * Truncated to fit, terminated by 0. */
FLASHVAR_API flashvar_status flashvar_merge_states_fwd_explain(
    const flashvar_merge_states_fwd_params* params, char* text, uint64_t size);
FLASHVAR_API flashvar_status flashvar_merge_states_bwd_explain(
    const flashvar_merge_states_bwd_params* params, char* text, uint64_t size);

#ifdef __cplusplus
}
#endif

#endif /* FLASHVAR_MERGE_STATES_H */
