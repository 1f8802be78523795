"""The third kernel of the Triton backward: the gradient of an additive bias, which is dS.

One program computes one tile of the gradient, summed over the batch entries and heads that share
it. So the kernel needs no atomics and no buffer larger than the gradient, and is deterministic. It
recomputes S and dP, and runs only if the gradient is needed.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803

# Triton's own language has no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from flashvar.backends.triton.attention.bwd_scores import grad_scores
from flashvar.backends.triton.attention.fwd import RUNTIME, STRIDE_UNIT
from flashvar.backends.triton.attention.matrices import load_rows, times_transposed
from flashvar.backends.triton.attention.scores import LOG2E


@triton.jit(do_not_specialize=RUNTIME)
def attention_bwd_bias_kernel(
    p_q,  # as in the forward; sequences are dense
    p_k, p_v, p_grad_out,
    p_lse_log2,  # from the first kernel
    p_delta,  # from the first kernel
    p_grad_bias,  # [bias_batches, bias_heads, seqlen_q, seqlen_k] float32, accumulated into
    p_bias, p_slopes, p_rng, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row,
    v_head, grad_out_batch, grad_out_row, grad_out_head, lse_batch, lse_head, bias_batch,
    bias_head, bias_query, grad_bias_batch, grad_bias_head, grad_bias_query,
    bias_batches,  # 1 if the whole batch shares the bias
    bias_heads,  # 1 if all heads share the bias
    slopes_batch, batch, heads_q, group, seqlen_q, seqlen_k, window_left, window_right, scale_log2,
    softcap_in, softcap_out, dropout_threshold, dropout_scale,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, HEAD_V: tl.constexpr,
    TAIL_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Compute one tile; the grid is one-dimensional: all tiles of all matrices of the bias."""
    tiles_k = tl.cdiv(seqlen_k, BLOCK_KV)
    tiles = tl.cdiv(seqlen_q, BLOCK_Q) * tiles_k
    i_tile = tl.program_id(0) % tiles
    i_matrix = tl.program_id(0) // tiles
    i_query = i_tile // tiles_k * BLOCK_Q
    i_key = i_tile % tiles_k * BLOCK_KV
    q_stride = q_row.to(tl.int64) * STRIDE_UNIT
    k_stride = k_row.to(tl.int64) * STRIDE_UNIT
    v_stride = v_row.to(tl.int64) * STRIDE_UNIT
    do_stride = grad_out_row.to(tl.int64) * STRIDE_UNIT
    o_rows = tl.arange(0, BLOCK_Q)
    o_query = i_query + o_rows[:, None]
    o_key = i_key + tl.arange(0, BLOCK_KV)[None, :]
    left_q = seqlen_q - i_query
    left_k = seqlen_k - i_key
    batches = batch // bias_batches
    heads = heads_q // bias_heads
    # The first of the entries that share this matrix: one or all, along either dimension.
    first_batch = i_matrix // bias_heads
    first_head = i_matrix % bias_heads
    b_total = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for i_member in range(0, batches * heads):
        i_sequence = first_batch + i_member // heads
        i_of_heads = first_head + i_member % heads
        i_batch = i_sequence.to(tl.int64)
        i_head = i_of_heads.to(tl.int64)
        i_head_kv = i_head // group
        p_q_block = p_q + (i_batch * q_batch + i_head * q_head) * STRIDE_UNIT + i_query * q_stride
        p_k_block = p_k + (i_batch * k_batch + i_head_kv * k_head) * STRIDE_UNIT + i_key * k_stride
        p_v_block = p_v + (i_batch * v_batch + i_head_kv * v_head) * STRIDE_UNIT + i_key * v_stride
        p_do_block = p_grad_out + (i_batch * grad_out_batch + i_head * grad_out_head) * STRIDE_UNIT
        p_do_block += i_query * do_stride
        b_q, b_q_tail = load_rows(p_q_block, q_stride, left_q, BLOCK_Q, HEAD_DIM, HEAD, TAIL, True)
        b_k, b_k_tail = load_rows(p_k_block, k_stride, left_k, BLOCK_KV, HEAD_DIM, HEAD, TAIL, True)
        b_s = times_transposed(b_q, b_q_tail, b_k, b_k_tail, TAIL)
        b_do, b_do_tail = load_rows(
            p_do_block, do_stride, left_q, BLOCK_Q, HEAD_DIM_V, HEAD_V, TAIL_V, True
        )
        b_v, b_v_tail = load_rows(
            p_v_block, v_stride, left_k, BLOCK_KV, HEAD_DIM_V, HEAD_V, TAIL_V, True
        )
        b_dp = times_transposed(b_do, b_do_tail, b_v, b_v_tail, TAIL_V)
        o_lse = i_batch * lse_batch + i_head * lse_head + i_query + o_rows
        b_lse = tl.load(p_lse_log2 + o_lse, mask=o_rows < left_q, other=float("inf"))
        b_delta = tl.load(p_delta + o_lse, mask=o_rows < left_q, other=0.0)
        slope = 0.0
        if p_slopes is not None:
            slope = tl.load(p_slopes + i_batch * slopes_batch + i_head) * LOG2E
        _, b_dbias, _ = grad_scores(
            b_s, b_dp, b_lse[:, None], b_delta[:, None], o_query, o_key,
            p_bias + i_batch * bias_batch + i_head * bias_head, p_rng, bias_query.to(tl.int64),
            seqlen_q, seqlen_k, window_left, window_right, scale_log2, softcap_in, softcap_out,
            slope, i_sequence * heads_q + i_of_heads, dropout_threshold, dropout_scale,
            SOFTCAP, p_slopes is not None, LEFT, RIGHT, True,
        )  # fmt: skip
        b_total += b_dbias
    p_grad_bias += first_batch.to(tl.int64) * grad_bias_batch
    p_grad_bias += first_head.to(tl.int64) * grad_bias_head
    p_tile = p_grad_bias + (o_query * grad_bias_query.to(tl.int64) + o_key)
    m_tile = (o_query < seqlen_q) & (o_key < seqlen_k)
    tl.store(p_tile, tl.load(p_tile, mask=m_tile, other=0.0) + b_total, mask=m_tile)
