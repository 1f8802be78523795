"""The second kernel of the Triton backward: dV = P^T dO and dK = scale dS^T Q.

One program computes one block of keys. It visits every query that sees them, of all heads that
share them. Scores are transposed, [keys, queries], so P and dS are left operands of the products.
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
from flashvar.backends.triton.attention.matrices import (
    clear_rows,
    load_rows,
    store_rows,
    times_transposed,
    zeros,
)
from flashvar.backends.triton.attention.ranges import queries_of_block
from flashvar.backends.triton.attention.scores import LOG2E
from flashvar.backends.triton.attention.sequences import rows_outside, span, work_tile


@triton.jit
def _accumulate_dkv(
    b_dk,  # [BLOCK_KV, HEAD] float32
    b_dk_tail,  # [BLOCK_KV, TAIL]
    b_dv,  # [BLOCK_KV, HEAD_V]
    b_dv_tail,
    b_k,
    b_k_tail,
    b_v,
    b_v_tail,
    p_q,  # query 0, dim 0 of the head
    p_grad_out,
    p_lse_log2,  # of query 0
    p_delta,
    p_bias,
    p_rng,
    q_stride,
    do_stride,
    bias_query,
    i_key,
    start,
    stop,
    gap_at,  # with MASKED: at this loop index the loop skips `gap` queries
    gap,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    scale_log2,
    softcap_in,
    softcap_out,
    slope,
    head_index,
    dropout_threshold,
    dropout_scale,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the contributions of queries `start` to `stop`; without MASKED they see every key."""
    o_rows = tl.arange(0, BLOCK_Q)
    o_key = i_key + tl.arange(0, BLOCK_KV)[:, None]
    for i_position in range(start, stop, BLOCK_Q):
        i_query = i_position
        if MASKED:
            i_query += tl.where(i_position >= gap_at, gap, 0)
        left = seqlen_q - i_query
        o_query = i_query + o_rows[None, :]
        b_q, b_q_tail = load_rows(
            p_q + i_query * q_stride, q_stride, left, BLOCK_Q, HEAD_DIM, HEAD, TAIL, MASKED
        )
        if MASKED:
            b_lse = tl.load(p_lse_log2 + i_query + o_rows, mask=o_rows < left, other=float("inf"))
            b_delta = tl.load(p_delta + i_query + o_rows, mask=o_rows < left, other=0.0)
        else:
            b_lse = tl.load(p_lse_log2 + i_query + o_rows)
            b_delta = tl.load(p_delta + i_query + o_rows)
        b_s = times_transposed(b_k, b_k_tail, b_q, b_q_tail, TAIL)
        b_do, b_do_tail = load_rows(
            p_grad_out + i_query * do_stride, do_stride, left,
            BLOCK_Q, HEAD_DIM_V, HEAD_V, TAIL_V, MASKED,
        )  # fmt: skip
        b_dp = times_transposed(b_v, b_v_tail, b_do, b_do_tail, TAIL_V)
        b_p, _, b_ds = grad_scores(
            b_s, b_dp, b_lse[None, :], b_delta[None, :], o_query, o_key, p_bias, p_rng,
            bias_query, seqlen_q, seqlen_k, window_left, window_right, scale_log2, softcap_in,
            softcap_out, slope, head_index, dropout_threshold, dropout_scale,
            SOFTCAP, ALIBI, LEFT, RIGHT, MASKED,
        )  # fmt: skip
        b_p = b_p.to(b_q.dtype)
        b_dv = tl.dot(b_p, b_do, b_dv)
        if TAIL_V > 0:
            b_dv_tail = tl.dot(b_p, b_do_tail, b_dv_tail)
        b_ds = b_ds.to(b_q.dtype)
        b_dk = tl.dot(b_ds, b_q, b_dk)
        if TAIL > 0:
            b_dk_tail = tl.dot(b_ds, b_q_tail, b_dk_tail)
    return b_dk, b_dk_tail, b_dv, b_dv_tail


@triton.jit
def _clear_outside(
    p_grad_k,
    p_grad_v,
    p_offsets_k,
    batch,
    total_k,
    i_row,
    dk_stride,
    dv_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Write zeros to rows that belong to no sequence."""
    m_outside = rows_outside(p_offsets_k, batch, total_k, i_row + tl.arange(0, BLOCK_KV))
    if tl.max(m_outside.to(tl.int32), 0) > 0:
        clear_rows(
            p_grad_k + i_row * dk_stride, dk_stride, m_outside, BLOCK_KV, HEAD_DIM, HEAD, TAIL
        )
        clear_rows(
            p_grad_v + i_row * dv_stride, dv_stride, m_outside, BLOCK_KV, HEAD_DIM_V, HEAD_V, TAIL_V
        )


@triton.jit(do_not_specialize=RUNTIME)
def attention_bwd_kv_kernel(
    p_q,  # as in the forward
    p_k, p_v,
    p_grad_out,  # [batch, seqlen_q, heads_q, HEAD_DIM_V]
    p_lse_log2,  # from the first kernel
    p_delta,  # from the first kernel
    p_grad_k,  # like p_k, written
    p_grad_v,  # like p_v, written
    p_bias, p_slopes, p_rng, p_offsets_q, p_offsets_k, p_used_k, q_batch, q_row, q_head, k_batch,
    k_row, k_head, v_batch, v_row, v_head, grad_out_batch, grad_out_row, grad_out_head,
    grad_k_batch, grad_k_row, grad_k_head, grad_v_batch, grad_v_row, grad_v_head, lse_batch,
    lse_head, bias_batch, bias_head, bias_query, slopes_batch, batch, heads_q, group, seqlen_q,
    seqlen_k, total_q, total_k, window_left, window_right, scale,
    scale_log2,  # scale * log2(e), with its sign
    softcap_in, softcap_out, dropout_threshold, dropout_scale,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, HEAD_V: tl.constexpr,
    TAIL_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Compute one block of keys; the grid is one-dimensional, in the order of `work_tile`."""
    i_batch, i_head_kv, i_block, i_tile = work_tile(
        p_offsets_k, batch, heads_q // group, seqlen_k, total_k, RIGHT and group > 1, BLOCK_KV
    )
    o_rows = tl.arange(0, BLOCK_KV)
    dk_stride = grad_k_row.to(tl.int64) * STRIDE_UNIT
    dv_stride = grad_v_row.to(tl.int64) * STRIDE_UNIT
    p_grad_k += i_head_kv.to(tl.int64) * grad_k_head * STRIDE_UNIT
    p_grad_v += i_head_kv.to(tl.int64) * grad_v_head * STRIDE_UNIT
    if p_offsets_k is not None:
        _clear_outside(
            p_grad_k, p_grad_v, p_offsets_k, batch, total_k, i_tile * BLOCK_KV, dk_stride,
            dv_stride, HEAD_DIM, HEAD_DIM_V, HEAD, TAIL, HEAD_V, TAIL_V, BLOCK_KV,
        )  # fmt: skip
    first_q, seqlen_q, _ = span(p_offsets_q, None, i_batch, seqlen_q, total_q)
    first_k, count_k, seqlen_k = span(p_offsets_k, p_used_k, i_batch, seqlen_k, total_k)
    i_key = i_block * BLOCK_KV
    if p_offsets_k is not None:  # noqa: SIM102 - the outer one is for the compiler
        if i_key >= count_k:
            return
    i_sequence = i_batch
    i_batch = i_batch.to(tl.int64)
    i_head_kv = i_head_kv.to(tl.int64)
    q_stride = q_row.to(tl.int64) * STRIDE_UNIT
    k_stride = k_row.to(tl.int64) * STRIDE_UNIT
    v_stride = v_row.to(tl.int64) * STRIDE_UNIT
    do_stride = grad_out_row.to(tl.int64) * STRIDE_UNIT
    i_row = first_k + i_key
    p_k += (i_batch * k_batch + i_head_kv * k_head) * STRIDE_UNIT + i_row * k_stride
    p_v += (i_batch * v_batch + i_head_kv * v_head) * STRIDE_UNIT + i_row * v_stride
    p_grad_k += i_batch * grad_k_batch * STRIDE_UNIT + i_row * dk_stride
    p_grad_v += i_batch * grad_v_batch * STRIDE_UNIT + i_row * dv_stride
    bias_query = bias_query.to(tl.int64)

    left = seqlen_k - i_key  # keys beyond seqlen_k may hold any bits
    b_k, b_k_tail = load_rows(p_k, k_stride, left, BLOCK_KV, HEAD_DIM, HEAD, TAIL, True)
    b_v, b_v_tail = load_rows(p_v, v_stride, left, BLOCK_KV, HEAD_DIM_V, HEAD_V, TAIL_V, True)
    b_dk, b_dk_tail = zeros(BLOCK_KV, HEAD, TAIL)
    b_dv, b_dv_tail = zeros(BLOCK_KV, HEAD_V, TAIL_V)

    start, stop, unmasked, masked, gap = queries_of_block(
        i_key, seqlen_q, seqlen_k, window_left, window_right, LEFT, RIGHT, BLOCK_Q, BLOCK_KV
    )
    for i_member in range(0, group):
        i_head = i_head_kv * group + i_member
        head_index = i_sequence * heads_q + i_head.to(tl.int32)
        p_q_head = p_q + (i_batch * q_batch + i_head * q_head) * STRIDE_UNIT + first_q * q_stride
        p_do_head = p_grad_out + (i_batch * grad_out_batch + i_head * grad_out_head) * STRIDE_UNIT
        p_do_head += first_q * do_stride
        o_lse = i_batch * lse_batch + i_head * lse_head + first_q
        p_bias_head = p_bias
        if p_bias is not None:
            p_bias_head = p_bias + i_batch * bias_batch + i_head * bias_head
        slope = 0.0
        if p_slopes is not None:
            slope = tl.load(p_slopes + i_batch * slopes_batch + i_head) * LOG2E
        b_dk, b_dk_tail, b_dv, b_dv_tail = _accumulate_dkv(
            b_dk, b_dk_tail, b_dv, b_dv_tail, b_k, b_k_tail, b_v, b_v_tail, p_q_head,
            p_do_head, p_lse_log2 + o_lse, p_delta + o_lse, p_bias_head, p_rng, q_stride,
            do_stride, bias_query, i_key, start, stop - gap, unmasked, gap, seqlen_q,
            seqlen_k, window_left, window_right, scale_log2, softcap_in, softcap_out, slope,
            head_index, dropout_threshold, dropout_scale, SOFTCAP, p_slopes is not None, LEFT,
            RIGHT, HEAD_DIM, HEAD_DIM_V, HEAD, TAIL, HEAD_V, TAIL_V, BLOCK_Q, BLOCK_KV, True,
        )  # fmt: skip
        b_dk, b_dk_tail, b_dv, b_dv_tail = _accumulate_dkv(
            b_dk, b_dk_tail, b_dv, b_dv_tail, b_k, b_k_tail, b_v, b_v_tail, p_q_head,
            p_do_head, p_lse_log2 + o_lse, p_delta + o_lse, p_bias_head, p_rng, q_stride,
            do_stride, bias_query, i_key, unmasked, masked, 0, 0, seqlen_q,
            seqlen_k, window_left, window_right, scale_log2, softcap_in, softcap_out, slope,
            head_index, dropout_threshold, dropout_scale, SOFTCAP, p_slopes is not None, LEFT,
            RIGHT, HEAD_DIM, HEAD_DIM_V, HEAD, TAIL, HEAD_V, TAIL_V, BLOCK_Q, BLOCK_KV, False,
        )  # fmt: skip
    if p_rng is not None:
        b_dv = b_dv * dropout_scale
        b_dv_tail = b_dv_tail * dropout_scale
    m_rows = o_rows < count_k - i_key
    store_rows(
        p_grad_k, dk_stride, m_rows, b_dk * scale, b_dk_tail * scale,
        BLOCK_KV, HEAD_DIM, HEAD, TAIL,
    )  # fmt: skip
    store_rows(p_grad_v, dv_stride, m_rows, b_dv, b_dv_tail, BLOCK_KV, HEAD_DIM_V, HEAD_V, TAIL_V)
