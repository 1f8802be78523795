"""The Triton kernels of the gated delta rule in chunks of tokens, by matrix products.

Names and formulas are those of flashvar.backends.reference.gated_delta_rule.chunked. chunk_kernel
computes the matrices that do not depend on states, for all chunks in parallel. In chain_kernel a
program iterates over the chunks of a sequence, with BLOCK_V columns of a head's state in registers.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from flashvar.backends.triton.gated_delta_rule.activations import LOWEST_GATE, beta_of, gate_of
from flashvar.backends.triton.gated_delta_rule.chunks import (
    RUNTIME,
    add_split,
    add_split_right,
    bounds,
    chunk_coordinate,
    decays,
    first_slot,
    load_split,
    norm_factors,
    split,
    store_split,
)

_BLOCK: Final = tl.constexpr(16)


@triton.jit
def _inverse(b_a, CHUNK: tl.constexpr):
    """inverse(I + a) of a strictly lower matrix, by forward substitution in two levels.

    First the diagonal blocks of 16, row by row and all blocks in parallel: d. Then the blocks below
    them, l: each iteration of x = d - (d l) x makes one more row of blocks final.
    """
    blocks: tl.constexpr = CHUNK // _BLOCK
    o_c = tl.arange(0, CHUNK)
    same = (o_c // _BLOCK)[:, None] == (o_c // _BLOCK)[None, :]
    b_blocks = tl.reshape(tl.where(same, b_a, 0.0), [blocks, _BLOCK, blocks, _BLOCK])
    b_diagonal = tl.sum(b_blocks, 2)  # [block, row, column]: all other blocks are 0
    o_b = tl.arange(0, _BLOCK)
    b_x = tl.where(o_b[:, None] == o_b[None, :], 1.0, 0.0)[None, :, :] + b_diagonal * 0.0
    for row in range(1, _BLOCK):
        m_row = o_b[None, :, None] == row
        b_row = tl.sum(tl.where(m_row, b_diagonal, 0.0), 1)  # [block, column]
        b_product = tl.sum(b_row[:, :, None] * b_x, 1)
        b_x = tl.where(m_row, b_x - b_product[:, None, :], b_x)
    b_spread = tl.broadcast_to(b_x[:, :, None, :], [blocks, _BLOCK, blocks, _BLOCK])
    b_d = tl.where(same, tl.reshape(b_spread, [CHUNK, CHUNK]), 0.0)
    b_l = tl.dot(b_d, tl.where(same, 0.0, b_a), input_precision="tf32x3")
    b_x = b_d
    for _ in range(1, blocks):
        b_x = b_d - tl.dot(b_l, b_x, input_precision="tf32x3")
    return b_x


@triton.jit(do_not_specialize=RUNTIME)
def chunk_kernel(
    p_q,  # [batch, seqlen, heads // group, K]
    p_k,
    p_g,  # [batch, seqlen, heads]; None: zeros
    p_beta,  # [batch, seqlen, heads]
    p_a_log,  # [heads]; None: g is the gate
    p_dt_bias,  # [heads]; None: zeros
    p_cu_seqlens,  # [sequences + 1]; None: each batch is a sequence
    p_mixed,  # T D, split [slots, heads, 2, CHUNK, CHUNK], contiguous, written
    p_scores,  # scale P, laid out like p_mixed, written
    p_rows,  # values of rows (chunks.py) [slots, heads, 4, CHUNK], contiguous, written
    q_batch, q_row, q_head, q_dim,
    k_batch, k_row, k_head, k_dim,
    g_batch, g_row, g_head,
    beta_batch, beta_row, beta_head,
    a_log_head, dt_bias_head, cu_seqlens_stride,
    seqlen, sequences,
    first_step,  # of the bisection: the largest power of two below `sequences`, or 0
    scale, heads, group,
    K: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, BETA_SCALE: tl.constexpr,
    EPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,  # dtype of operands of tl.dot
    PRECISION: tl.constexpr,  # of tl.dot with float32 operands
):  # fmt: skip
    """Writes the matrices of one chunk. Grid: slots x heads, on one axis."""
    i_head = (tl.program_id(0) % heads).to(tl.int64)
    slot = (tl.program_id(0) // heads).to(tl.int64)
    i_sequence, row, end = chunk_coordinate(
        p_cu_seqlens, cu_seqlens_stride, slot, seqlen, sequences, first_step, CHUNK
    )
    if row >= end:  # no chunk has this slot
        return
    i_batch = i_sequence if p_cu_seqlens is None else i_sequence * 0
    o_c = tl.arange(0, CHUNK)
    o_row = row + o_c
    m_row = o_row < end
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    m_rows = m_row[:, None] & (o_k < K)[None, :]

    p_q += i_batch * q_batch + i_head // group * q_head
    p_q += o_row[:, None] * q_row + o_k[None, :] * q_dim
    p_k += i_batch * k_batch + i_head // group * k_head
    p_k += o_row[:, None] * k_row + o_k[None, :] * k_dim
    b_q = tl.load(p_q, mask=m_rows, other=0.0).to(OPERAND)
    b_k = tl.load(p_k, mask=m_rows, other=0.0).to(OPERAND)
    b_norm_q = scale * norm_factors(tl.trans(b_q), L2NORM, EPS)
    b_norm_k = norm_factors(tl.trans(b_k), L2NORM, EPS)
    p_beta += i_batch * beta_batch + o_row * beta_row + i_head * beta_head
    b_beta = beta_of(tl.load(p_beta, mask=m_row, other=0.0).to(tl.float32), SIGMOID, BETA_SCALE)
    b_beta = tl.where(m_row, b_beta, 0.0)
    b_g = tl.zeros([CHUNK], tl.float32)
    if p_g is not None:
        p_g += i_batch * g_batch + o_row * g_row + i_head * g_head
        if p_a_log is not None:
            p_a_log += i_head * a_log_head
        if p_dt_bias is not None:
            p_dt_bias += i_head * dt_bias_head
        b_g = gate_of(tl.load(p_g, mask=m_row, other=0.0).to(tl.float32), p_a_log, p_dt_bias)
        b_g = tl.where(m_row, tl.maximum(b_g, LOWEST_GATE, propagate_nan=tl.PropagateNan.ALL), 0.0)
    b_sums = tl.cumsum(b_g, 0)

    first_row = (slot * heads + i_head) * CHUNK
    o_square = o_c[:, None] * CHUNK + o_c[None, :]
    b_decay = decays(b_sums, o_c, False)
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_scores *= b_norm_q[:, None] * b_norm_k[None, :] * b_decay
    store_split(p_scores + first_row * 2 * CHUNK + o_square, b_scores, CHUNK, OPERAND)
    b_a = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_a *= (b_beta * b_norm_k)[:, None] * b_norm_k[None, :]
    b_mixed = _inverse(tl.where(o_c[:, None] > o_c[None, :], b_a, 0.0), CHUNK) * b_decay
    store_split(p_mixed + first_row * 2 * CHUNK + o_square, b_mixed, CHUNK, OPERAND)
    p_rows += first_row * 4 + o_c
    tl.store(p_rows, b_sums)
    tl.store(p_rows + CHUNK, b_beta)
    tl.store(p_rows + 2 * CHUNK, b_norm_q)
    tl.store(p_rows + 3 * CHUNK, b_norm_k)


@triton.jit(do_not_specialize=RUNTIME)
def chain_kernel(
    p_q,  # [batch, seqlen, heads // group, K]
    p_k,
    p_v,  # [batch, seqlen, heads, V]
    p_cu_seqlens,
    p_mixed,  # of chunk_kernel, as the next two
    p_scores,
    p_rows,
    p_before,  # [sequences, heads, K, V]; None: zeros
    p_after,  # like before; None: not written
    p_out,  # [batch, seqlen, heads, V], rows contiguous; None: not written
    p_states,  # S before each chunk [slots, heads, K, V], contiguous; None: not written
    p_updates,  # N [slots, heads, CHUNK, V], contiguous; None: not written
    q_batch, q_row, q_head, q_dim,
    k_batch, k_row, k_head, k_dim,
    v_batch, v_row, v_head, v_dim,
    cu_seqlens_stride,
    before_state, before_head, before_k, before_v,
    after_state, after_head, after_k, after_v,
    out_batch, out_row, out_head,
    seqlen, heads, group,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Iterates over a sequence. Grid: sequences x heads x column blocks, on one axis.

    The forward writes out and after. The backward runs the chain again and writes states and
    updates.
    """
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    i_sequence = (tl.program_id(0) // (blocks * heads)).to(tl.int64)
    o_c = tl.arange(0, CHUNK)
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    o_v = (tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    m_k, m_v = o_k < K, o_v < V
    m_state = m_k[:, None] & m_v[None, :]
    o_square = o_c[:, None] * CHUNK + o_c[None, :]
    o_values = o_c[:, None] * V + o_v.to(tl.int32)[None, :]
    o_state = o_k.to(tl.int32)[:, None] * V + o_v.to(tl.int32)[None, :]

    begin, end = bounds(p_cu_seqlens, cu_seqlens_stride, i_sequence, seqlen)
    slot = first_slot(begin, i_sequence, seqlen, p_cu_seqlens is not None, CHUNK)
    i_batch = i_sequence if p_cu_seqlens is None else i_sequence * 0
    p_q += i_batch * q_batch + i_head // group * q_head + o_k[None, :] * q_dim
    p_k += i_batch * k_batch + i_head // group * k_head + o_k[None, :] * k_dim
    p_v += i_batch * v_batch + i_head * v_head + o_v[None, :] * v_dim
    if p_out is not None:
        p_out += i_batch * out_batch + i_head * out_head + o_v[None, :]
    b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if p_before is not None:
        p_before += i_sequence * before_state + i_head * before_head
        p_before += o_k[:, None] * before_k + o_v[None, :] * before_v
        b_state = tl.load(p_before, mask=m_state, other=0.0).to(tl.float32)

    for row in range(begin, end, CHUNK):
        o_row = row + o_c.to(tl.int64)
        m_row = (o_row < end)[:, None]
        m_values = m_row & m_v[None, :]
        b_k = tl.load(p_k + o_row[:, None] * k_row, mask=m_row & m_k[None, :], other=0.0)
        b_v = tl.load(p_v + o_row[:, None] * v_row, mask=m_values, other=0.0).to(tl.float32)
        b_k = b_k.to(OPERAND)
        first_row = (slot * heads + i_head) * CHUNK
        p_chunk = p_mixed + first_row * 2 * CHUNK + o_square
        b_mixed, b_mixed_low = load_split(p_chunk, CHUNK, OPERAND)
        b_sums = tl.load(p_rows + first_row * 4 + o_c)
        b_beta = tl.load(p_rows + first_row * 4 + CHUNK + o_c)[:, None]
        b_norm_k = tl.load(p_rows + first_row * 4 + 3 * CHUNK + o_c)
        b_last = tl.load(p_rows + first_row * 4 + CHUNK - 1)
        b_operand = b_state.to(OPERAND)
        if p_states is not None:
            tl.store(p_states + (slot * heads + i_head) * K * V + o_state, b_operand, mask=m_state)

        b_predicted = tl.dot(b_k, b_operand, input_precision=PRECISION)
        b_residual = b_beta * (b_v - (tl.exp(b_sums) * b_norm_k)[:, None] * b_predicted)
        b_high, b_low = split(b_residual, OPERAND)
        b_updates = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        b_updates = add_split(b_updates, b_mixed, b_mixed_low, b_high, b_low, OPERAND, PRECISION)
        if p_updates is not None:
            tl.store(p_updates + first_row * V + o_values, b_updates, mask=m_v[None, :])
        if p_out is not None:
            b_q = tl.load(p_q + o_row[:, None] * q_row, mask=m_row & m_k[None, :], other=0.0)
            p_chunk = p_scores + first_row * 2 * CHUNK + o_square
            b_scores, b_scores_low = load_split(p_chunk, CHUNK, OPERAND)
            b_norm_q = tl.load(p_rows + first_row * 4 + 2 * CHUNK + o_c)
            b_out = tl.dot(b_q.to(OPERAND), b_operand, input_precision=PRECISION)
            b_out *= (tl.exp(b_sums) * b_norm_q)[:, None]
            b_high, b_low = split(b_updates, OPERAND)
            b_out = add_split(b_out, b_scores, b_scores_low, b_high, b_low, OPERAND, PRECISION)
            b_out = b_out.to(p_out.dtype.element_ty)
            tl.store(p_out + o_row[:, None] * out_row, b_out, mask=m_values)
        b_decayed = (tl.exp(b_last - b_sums) * b_norm_k)[:, None] * b_updates
        b_state *= tl.exp(b_last)
        b_state = add_split_right(b_state, tl.trans(b_k), b_decayed, OPERAND, PRECISION)
        slot += 1

    if p_after is not None:
        p_after += i_sequence * after_state + i_head * after_head
        p_after += o_k[:, None] * after_k + o_v[None, :] * after_v
        tl.store(p_after, b_state.to(p_after.dtype.element_ty), mask=m_state)
