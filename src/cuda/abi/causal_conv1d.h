/* The C ABI of causal_conv1d: the functions causal_conv1d_fwd, causal_conv1d_bwd and
 * causal_conv1d_update. */
#ifndef FLASHVAR_CAUSAL_CONV1D_H
#define FLASHVAR_CAUSAL_CONV1D_H

#include "flashvar.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bits of `flags`. */
enum {
  FLASHVAR_CONV1D_SILU = 1u,            /* the activation is SiLU; else there is none */
  FLASHVAR_CONV1D_INT64_SEQLENS = 2u,   /* cu_seqlens is int64, else int32 */
  FLASHVAR_CONV1D_INT64_INDICES = 4u,   /* state_indices likewise */
  FLASHVAR_CONV1D_INT64_POSITIONS = 8u, /* state_positions likewise */
};

/* A tensor of three dimensions or fewer: where there are fewer, the first strides are 0. Strides in
 * elements, any; of what is written no two elements alias. The stride of a dimension of size 1
 * should be 0: it is never used, and another value may make aligned rows look unaligned. */
typedef struct flashvar_strided {
  void* data; /* may be NULL where the op's header says so */
  int64_t first_stride;
  int64_t second_stride;
  int64_t third_stride;
  uint32_t dtype;    /* flashvar_dtype */
  uint32_t reserved; /* 0 */
} flashvar_strided;

/* Each channel d of a sequence x[0], x[1], ... is convolved with its own filter:
 *   z[t] = bias[d] + sum_j weight[d, j] x[t - (width - 1) + j],  y[t] = act(z[t]) + residual[t].
 * Before a sequence is its state: x[-c] is state[d, columns - c], and 0 where there is none. Sums
 * are fp32, in one order.
 *
 * Varlen: with cu_seqlens the batch is 1, and sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1]
 * of it. Offsets start at 0, end at seqlen and never decrease. With other offsets results are
 * undefined, but no access is outside of the tensors. */
typedef struct flashvar_causal_conv1d_problem {
  int64_t batch;
  int64_t seqlen; /* varlen: the rows of all sequences */
  int64_t dim;
  int64_t sequences; /* the batch; varlen: the number of sequences; of an update: of states */
  int32_t width;     /* 2 to 4 */
  int32_t columns;   /* of a state */
  uint32_t dtype;    /* flashvar_dtype of x and what is like it */
  uint32_t flags;
  const void* cu_seqlens;  /* [sequences + 1] or NULL; not of an update */
  flashvar_strided x;      /* [batch, seqlen, dim] */
  flashvar_strided weight; /* [dim, width] */
  flashvar_strided bias;   /* [dim]; data may be NULL: zeros */
  flashvar_strided state;  /* [sequences, dim, columns]; data may be NULL: zeros */
} flashvar_causal_conv1d_problem;

typedef struct flashvar_causal_conv1d_fwd_params {
  flashvar_call call;
  flashvar_strided y;           /* like x, written */
  flashvar_strided residual;    /* like x, of any dtype; data may be NULL: zeros */
  flashvar_strided final_state; /* [sequences, dim, final_columns], written */
  int32_t final_columns;        /* 0: not wanted */
  uint32_t reserved;            /* 0 */
  flashvar_causal_conv1d_problem problem;
} flashvar_causal_conv1d_fwd_params;

typedef struct flashvar_causal_conv1d_bwd_params {
  flashvar_call call;
  flashvar_strided grad_x;      /* like x, written */
  flashvar_strided grad_weight; /* like weight, written */
  flashvar_strided grad_bias;   /* like bias, written; data may be NULL: not wanted */
  flashvar_strided grad_state;  /* like state, written; data may be NULL: not wanted */
  flashvar_strided grad_y;      /* like x */
  flashvar_strided grad_final;  /* [sequences, dim, final_columns]; data may be NULL: zeros */
  int32_t final_columns;
  uint32_t reserved;                      /* 0 */
  flashvar_causal_conv1d_problem problem; /* as in the forward */
} flashvar_causal_conv1d_bwd_params;

typedef struct flashvar_causal_conv1d_update_params {
  flashvar_call call;
  flashvar_strided y;          /* like x, written */
  flashvar_strided residual;   /* like x, of any dtype; data may be NULL: zeros */
  const void* state_indices;   /* [batch], each state at most once; NULL: 0, 1, 2, ... */
  const void* state_positions; /* [batch] or NULL: the newest token is in the last column */
  flashvar_causal_conv1d_problem problem; /* state is written; it has width - 1 columns or more */
} flashvar_causal_conv1d_update_params;

/* The output, and the states after the sequences. Enqueues on the stream and returns; empty
 * problems return without a launch. */
FLASHVAR_API flashvar_status
flashvar_causal_conv1d_fwd(const flashvar_causal_conv1d_fwd_params* params);

/* The gradients of flashvar_causal_conv1d_fwd, the same bits on every run. The gradient of residual
 * is grad_y itself and is not written. */
FLASHVAR_API flashvar_status
flashvar_causal_conv1d_bwd(const flashvar_causal_conv1d_bwd_params* params);

/* The output of the next seqlen tokens of each sequence, which are shifted into its state. Where
 * there are positions, states are circular buffers: x[t] of sequence i goes to column
 * (state_positions[i] + t) % columns. A sequence whose index is negative outputs 0, one whose index
 * is past the last state NaN; neither writes a state. */
FLASHVAR_API flashvar_status
flashvar_causal_conv1d_update(const flashvar_causal_conv1d_update_params* params);

/* Writes to `size` the bytes of workspace that a call needs: of a backward a few percent of those
 * of x if sequences are long, more if they are short, and as many as grad_y has where it alone has
 * another order of dimensions; else 0. They depend on sizes, strides, and the distances of
 * addresses from multiples of 16 bytes. */
FLASHVAR_API flashvar_status flashvar_causal_conv1d_fwd_workspace(
    const flashvar_causal_conv1d_fwd_params* params, uint64_t* size);
FLASHVAR_API flashvar_status flashvar_causal_conv1d_bwd_workspace(
    const flashvar_causal_conv1d_bwd_params* params, uint64_t* size);
FLASHVAR_API flashvar_status flashvar_causal_conv1d_update_workspace(
    const flashvar_causal_conv1d_update_params* params, uint64_t* size);

/* Writes to `text`, of `size` bytes, how a call would read its tensors and why: "simt: ...".
 * Truncated to fit, terminated by 0. */
FLASHVAR_API flashvar_status flashvar_causal_conv1d_fwd_explain(
    const flashvar_causal_conv1d_fwd_params* params, char* text, uint64_t size);
FLASHVAR_API flashvar_status flashvar_causal_conv1d_bwd_explain(
    const flashvar_causal_conv1d_bwd_params* params, char* text, uint64_t size);
FLASHVAR_API flashvar_status flashvar_causal_conv1d_update_explain(
    const flashvar_causal_conv1d_update_params* params, char* text, uint64_t size);

#ifdef __cplusplus
}
#endif

#endif /* FLASHVAR_CAUSAL_CONV1D_H */
