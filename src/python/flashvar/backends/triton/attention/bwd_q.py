"""The first kernel of the Triton backward: the gradient of q, and delta of every query.

With P the probabilities, dP = dO V^T and delta = rowsum(dO o O) - dLSE: dS = P o (dP - delta) and
dQ = scale dS K (FlashAttention-2, Dao 2023, section 3.2). Every program computes its own rows of
dQ, and in the second kernel its own rows of dK and dV. Nothing is accumulated in memory, so the
backward is deterministic; in exchange, S and dP are computed twice.
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
from flashvar.backends.triton.attention.ranges import keys_of_block
from flashvar.backends.triton.attention.scores import LOG2E
from flashvar.backends.triton.attention.sequences import rows_outside, span, work_tile


@triton.jit
def _accumulate_dq(
    b_dq,  # [BLOCK_Q, HEAD] float32
    b_dq_tail,  # [BLOCK_Q, TAIL]
    b_q,
    b_q_tail,
    b_do,  # [BLOCK_Q, HEAD_V]
    b_do_tail,
    b_lse,  # [BLOCK_Q]
    b_delta,  # [BLOCK_Q]
    p_k,  # key 0, dim 0 of the head
    p_v,
    p_bias,
    p_rng,
    k_stride,
    v_stride,
    bias_query,
    i_query,
    start,
    stop,
    gap_at,  # with MASKED and LEFT: at this loop index the loop skips `gap` keys
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
    """Add the contributions of keys `start` to `stop`; without MASKED every row sees them all."""
    o_query = i_query + tl.arange(0, BLOCK_Q)[:, None]
    for i_position in range(start, stop, BLOCK_KV):
        i_key = i_position
        if MASKED and LEFT:
            i_key += tl.where(i_position >= gap_at, gap, 0)
        left = seqlen_k - i_key
        o_key = i_key + tl.arange(0, BLOCK_KV)[None, :]
        b_k, b_k_tail = load_rows(
            p_k + i_key * k_stride, k_stride, left, BLOCK_KV, HEAD_DIM, HEAD, TAIL, MASKED
        )
        b_s = times_transposed(b_q, b_q_tail, b_k, b_k_tail, TAIL)
        b_v, b_v_tail = load_rows(
            p_v + i_key * v_stride, v_stride, left, BLOCK_KV, HEAD_DIM_V, HEAD_V, TAIL_V, MASKED
        )
        b_dp = times_transposed(b_do, b_do_tail, b_v, b_v_tail, TAIL_V)
        _, _, b_ds = grad_scores(
            b_s, b_dp, b_lse[:, None], b_delta[:, None], o_query, o_key, p_bias, p_rng, bias_query,
            seqlen_q, seqlen_k, window_left, window_right, scale_log2, softcap_in, softcap_out,
            slope, head_index, dropout_threshold, dropout_scale,
            SOFTCAP, ALIBI, LEFT, RIGHT, MASKED,
        )  # fmt: skip
        b_ds = b_ds.to(b_k.dtype)
        b_dq = tl.dot(b_ds, b_k, b_dq)
        if TAIL > 0:
            b_dq_tail = tl.dot(b_ds, b_k_tail, b_dq_tail)
    return b_dq, b_dq_tail


@triton.jit
def _clear_outside(
    p_grad_q,
    p_offsets_q,
    batch,
    total_q,
    i_row,
    dq_stride,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Write zeros to rows that belong to no sequence."""
    m_outside = rows_outside(p_offsets_q, batch, total_q, i_row + tl.arange(0, BLOCK_Q))
    if tl.max(m_outside.to(tl.int32), 0) > 0:
        clear_rows(
            p_grad_q + i_row * dq_stride, dq_stride, m_outside, BLOCK_Q, HEAD_DIM, HEAD, TAIL
        )


@triton.jit
def _lse_and_delta(
    b_do,  # [BLOCK_Q, HEAD_V]
    b_do_tail,  # [BLOCK_Q, TAIL_V]
    b_out,
    b_out_tail,
    p_lse,
    p_grad_lse,
    p_lse_log2,
    p_delta,
    o_lse,
    m_rows,
    TAIL_V: tl.constexpr,
):
    """The log-sum-exp times log2(e), inf if a row sees no key, and delta; both are written too."""
    b_delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1)
    if TAIL_V > 0:
        b_delta += tl.sum(b_do_tail.to(tl.float32) * b_out_tail.to(tl.float32), 1)
    b_lse = tl.load(p_lse + o_lse, mask=m_rows, other=float("-inf"))
    if p_grad_lse is not None:
        b_delta -= tl.load(p_grad_lse + o_lse, mask=m_rows, other=0.0)
    m_blind = b_lse == float("-inf")
    b_delta = tl.where(m_blind, 0.0, b_delta)
    b_lse = tl.where(m_blind, float("inf"), b_lse * LOG2E)
    tl.store(p_delta + o_lse, b_delta, mask=m_rows)
    tl.store(p_lse_log2 + o_lse, b_lse, mask=m_rows)
    return b_lse, b_delta


@triton.jit(do_not_specialize=RUNTIME)
def attention_bwd_q_kernel(
    p_q,  # as in the forward
    p_k, p_v, p_out, p_lse,
    p_grad_out,  # [batch, seqlen_q, heads_q, HEAD_DIM_V]
    p_grad_lse,  # like p_lse; may be None
    p_grad_q,  # like p_q, written
    p_lse_log2,  # like p_lse, written: log-sum-exp times log2(e), inf if a row sees no key
    p_delta,  # like p_lse, written: delta
    p_bias, p_slopes, p_rng, p_offsets_q, p_offsets_k, p_used_k, q_batch, q_row, q_head, k_batch,
    k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head, grad_out_batch,
    grad_out_row, grad_out_head, grad_q_batch, grad_q_row, grad_q_head, lse_batch, lse_head,
    bias_batch, bias_head, bias_query, slopes_batch, batch, heads_q, group, seqlen_q, seqlen_k,
    total_q, total_k, window_left, window_right, scale,
    scale_log2,  # scale * log2(e), with its sign
    softcap_in, softcap_out, dropout_threshold, dropout_scale,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, HEAD_V: tl.constexpr,
    TAIL_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Compute one block of query rows; the grid is one-dimensional, in the order of `work_tile`."""
    i_batch, i_head, i_block, i_tile = work_tile(
        p_offsets_q, batch, heads_q, seqlen_q, total_q, False, BLOCK_Q
    )
    o_rows = tl.arange(0, BLOCK_Q)
    dq_stride = grad_q_row.to(tl.int64) * STRIDE_UNIT
    p_grad_q += i_head.to(tl.int64) * grad_q_head * STRIDE_UNIT
    if p_offsets_q is not None:
        _clear_outside(
            p_grad_q, p_offsets_q, batch, total_q, i_tile * BLOCK_Q, dq_stride,
            HEAD_DIM, HEAD, TAIL, BLOCK_Q,
        )  # fmt: skip
    first_q, seqlen_q, _ = span(p_offsets_q, None, i_batch, seqlen_q, total_q)
    first_k, _, seqlen_k = span(p_offsets_k, p_used_k, i_batch, seqlen_k, total_k)
    blocks = tl.cdiv(seqlen_q, BLOCK_Q)
    if p_offsets_q is not None:  # noqa: SIM102 - the outer one is for the compiler
        if i_block >= blocks:
            return
    if RIGHT:
        i_block = blocks - 1 - i_block  # longest blocks first, so that programs end together
    i_query = i_block * BLOCK_Q
    head_index = i_batch * heads_q + i_head
    i_batch = i_batch.to(tl.int64)
    i_head = i_head.to(tl.int64)
    i_head_kv = i_head // group
    q_stride = q_row.to(tl.int64) * STRIDE_UNIT
    k_stride = k_row.to(tl.int64) * STRIDE_UNIT
    v_stride = v_row.to(tl.int64) * STRIDE_UNIT
    out_stride = out_row.to(tl.int64) * STRIDE_UNIT
    do_stride = grad_out_row.to(tl.int64) * STRIDE_UNIT
    i_row = first_q + i_query
    p_q += (i_batch * q_batch + i_head * q_head) * STRIDE_UNIT + i_row * q_stride
    p_k += (i_batch * k_batch + i_head_kv * k_head) * STRIDE_UNIT + first_k * k_stride
    p_v += (i_batch * v_batch + i_head_kv * v_head) * STRIDE_UNIT + first_k * v_stride
    p_out += (i_batch * out_batch + i_head * out_head) * STRIDE_UNIT + i_row * out_stride
    p_grad_out += (i_batch * grad_out_batch + i_head * grad_out_head) * STRIDE_UNIT
    p_grad_out += i_row * do_stride
    p_grad_q += i_batch * grad_q_batch * STRIDE_UNIT + i_row * dq_stride
    bias_query = bias_query.to(tl.int64)
    if p_bias is not None:
        p_bias += i_batch * bias_batch + i_head * bias_head
    slope = 0.0
    if p_slopes is not None:
        slope = tl.load(p_slopes + i_batch * slopes_batch + i_head) * LOG2E

    left = seqlen_q - i_query
    m_rows = o_rows < left
    b_do, b_do_tail = load_rows(
        p_grad_out, do_stride, left, BLOCK_Q, HEAD_DIM_V, HEAD_V, TAIL_V, True
    )
    b_out, b_out_tail = load_rows(
        p_out, out_stride, left, BLOCK_Q, HEAD_DIM_V, HEAD_V, TAIL_V, True
    )
    o_lse = i_batch * lse_batch + i_head * lse_head + i_row + o_rows
    b_lse, b_delta = _lse_and_delta(
        b_do, b_do_tail, b_out, b_out_tail, p_lse, p_grad_lse, p_lse_log2, p_delta, o_lse, m_rows,
        TAIL_V,
    )  # fmt: skip
    b_q, b_q_tail = load_rows(p_q, q_stride, left, BLOCK_Q, HEAD_DIM, HEAD, TAIL, True)
    b_dq, b_dq_tail = zeros(BLOCK_Q, HEAD, TAIL)

    start, stop, unmasked, masked, gap = keys_of_block(
        i_query, seqlen_q, seqlen_k, window_left, window_right, LEFT, RIGHT, BLOCK_Q, BLOCK_KV
    )
    b_dq, b_dq_tail = _accumulate_dq(
        b_dq, b_dq_tail, b_q, b_q_tail, b_do, b_do_tail, b_lse, b_delta, p_k, p_v, p_bias,
        p_rng, k_stride, v_stride, bias_query, i_query, unmasked, masked, 0, 0, seqlen_q, seqlen_k,
        window_left, window_right, scale_log2, softcap_in, softcap_out, slope, head_index,
        dropout_threshold, dropout_scale, SOFTCAP, p_slopes is not None, LEFT, RIGHT,
        HEAD_DIM, HEAD_DIM_V, HEAD, TAIL, HEAD_V, TAIL_V, BLOCK_Q, BLOCK_KV, False,
    )  # fmt: skip
    b_dq, b_dq_tail = _accumulate_dq(
        b_dq, b_dq_tail, b_q, b_q_tail, b_do, b_do_tail, b_lse, b_delta, p_k, p_v, p_bias,
        p_rng, k_stride, v_stride, bias_query, i_query, start, stop - gap, unmasked, gap,
        seqlen_q, seqlen_k, window_left, window_right, scale_log2, softcap_in, softcap_out, slope,
        head_index, dropout_threshold, dropout_scale, SOFTCAP, p_slopes is not None, LEFT, RIGHT,
        HEAD_DIM, HEAD_DIM_V, HEAD, TAIL, HEAD_V, TAIL_V, BLOCK_Q, BLOCK_KV, True,
    )  # fmt: skip
    store_rows(
        p_grad_q, dq_stride, m_rows, b_dq * scale, b_dq_tail * scale, BLOCK_Q, HEAD_DIM, HEAD, TAIL
    )
