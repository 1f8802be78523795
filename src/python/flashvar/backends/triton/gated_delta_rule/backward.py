"""The Triton kernels of the backward of the gated delta rule.

Names and formulas are those of flashvar.backends.reference.gated_delta_rule.chunked. The states
before each chunk, and N, are written by the forward's chain_kernel. Then

    reverse_kernel   iterates from the last chunk to the first, with BLOCK_V columns of the gradient
                     of a head's state in registers
    squares_kernel   computes gradients of [CHUNK, CHUNK] matrices, for each chunk and head of v
    rows_kernel      computes gradients of rows, for each chunk and head of q; it sums over the
                     heads of v that share the head of q, in order

Left operands of tl.dot are never transposed in registers: Triton has miscompiled that for Hopper.
So squares are computed transposed, [column, row], and loaded again where both orders are needed.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from flashvar.backends.triton.gated_delta_rule.activations import gate_backward
from flashvar.backends.triton.gated_delta_rule.chunks import (
    RUNTIME,
    add_split,
    add_split_left,
    add_split_right,
    bounds,
    chunk_coordinate,
    decays,
    first_slot,
    join,
    load_split,
    norm_factors,
    split,
    store_split,
)


@triton.jit(do_not_specialize=RUNTIME)
def reverse_kernel(
    p_q,  # [batch, seqlen, heads // group, K]
    p_k,
    p_cu_seqlens,
    p_mixed,  # of chunk_kernel, as the next two
    p_scores,
    p_rows,
    p_grad_out,  # [batch, seqlen, heads, V]
    p_grad_after,  # [sequences, heads, K, V]; None: zeros
    p_grad_before,  # like p_grad_after, contiguous, written; None: not written
    p_grad_states,  # of S after each chunk [slots, heads, K, V], contiguous, written
    p_grad_updates,  # of N [slots, heads, CHUNK, V], contiguous, written
    p_grad_v,  # [batch, seqlen, heads, V], contiguous, written
    q_batch, q_row, q_head, q_dim,
    k_batch, k_row, k_head, k_dim,
    cu_seqlens_stride,
    grad_out_batch, grad_out_row, grad_out_head, grad_out_dim,
    grad_after_state, grad_after_head, grad_after_k, grad_after_v,
    seqlen, heads, group,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Iterates over a sequence backwards. Grid: sequences x heads x column blocks, on one axis."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    i_sequence = (tl.program_id(0) // (blocks * heads)).to(tl.int64)
    o_c = tl.arange(0, CHUNK)
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    o_v = (tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    m_k, m_v = o_k < K, o_v < V
    m_state = m_k[:, None] & m_v[None, :]
    o_state = o_k.to(tl.int32)[:, None] * V + o_v.to(tl.int32)[None, :]
    o_square = o_c[:, None] * CHUNK + o_c[None, :]
    o_values = o_c[:, None] * V + o_v.to(tl.int32)[None, :]

    begin, end = bounds(p_cu_seqlens, cu_seqlens_stride, i_sequence, seqlen)
    first = first_slot(begin, i_sequence, seqlen, p_cu_seqlens is not None, CHUNK)
    i_batch = i_sequence if p_cu_seqlens is None else i_sequence * 0
    p_q += i_batch * q_batch + i_head // group * q_head + o_k[None, :] * q_dim
    p_k += i_batch * k_batch + i_head // group * k_head + o_k[None, :] * k_dim
    p_grad_out += i_batch * grad_out_batch + i_head * grad_out_head + o_v[None, :] * grad_out_dim
    p_grad_v += (i_batch * seqlen * heads + i_head) * V + o_v[None, :]
    b_grad = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if p_grad_after is not None:
        p_grad_after += i_sequence * grad_after_state + i_head * grad_after_head
        p_grad_after += o_k[:, None] * grad_after_k + o_v[None, :] * grad_after_v
        b_grad = tl.load(p_grad_after, mask=m_state, other=0.0).to(tl.float32)

    chunks = (tl.maximum(end - begin, 0) + CHUNK - 1) // CHUNK
    for i in range(0, chunks):
        slot = first + chunks - 1 - i
        o_row = begin + (chunks - 1 - i) * CHUNK + o_c.to(tl.int64)
        m_row = (o_row < end)[:, None]
        m_rows, m_values = m_row & m_k[None, :], m_row & m_v[None, :]
        b_q = tl.load(p_q + o_row[:, None] * q_row, mask=m_rows, other=0.0).to(OPERAND)
        b_k = tl.load(p_k + o_row[:, None] * k_row, mask=m_rows, other=0.0).to(OPERAND)
        b_grad_out = tl.load(p_grad_out + o_row[:, None] * grad_out_row, mask=m_values, other=0.0)
        b_grad_out = b_grad_out.to(OPERAND)
        first_row = (slot * heads + i_head) * CHUNK
        p_chunk = p_mixed + first_row * 2 * CHUNK + o_square
        b_mixed, b_mixed_low = load_split(p_chunk, CHUNK, OPERAND)
        p_chunk = p_scores + first_row * 2 * CHUNK + o_square
        b_scores, b_scores_low = load_split(p_chunk, CHUNK, OPERAND)
        b_sums = tl.load(p_rows + first_row * 4 + o_c)
        b_beta = tl.load(p_rows + first_row * 4 + CHUNK + o_c)[:, None]
        b_norm_q = tl.load(p_rows + first_row * 4 + 2 * CHUNK + o_c)
        b_norm_k = tl.load(p_rows + first_row * 4 + 3 * CHUNK + o_c)
        b_last = tl.load(p_rows + first_row * 4 + CHUNK - 1)
        b_left = tl.exp(b_sums)
        b_operand = b_grad.to(OPERAND)
        p_chunk = p_grad_states + (slot * heads + i_head) * K * V
        tl.store(p_chunk + o_state, b_operand, mask=m_state)

        b_grad_updates = tl.dot(b_k, b_operand, input_precision=PRECISION)
        b_grad_updates *= (tl.exp(b_last - b_sums) * b_norm_k)[:, None]
        b_high, b_low = tl.trans(b_scores), tl.trans(b_scores_low)
        b_grad_updates = add_split_left(
            b_grad_updates, b_high, b_low, b_grad_out, OPERAND, PRECISION
        )
        tl.store(p_grad_updates + first_row * V + o_values, b_grad_updates, mask=m_v[None, :])
        b_mixed, b_mixed_low = tl.trans(b_mixed), tl.trans(b_mixed_low)
        b_high, b_low = split(b_grad_updates, OPERAND)
        b_grad_v = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        b_grad_v = add_split(b_grad_v, b_mixed, b_mixed_low, b_high, b_low, OPERAND, PRECISION)
        b_grad_v *= b_beta
        p_chunk = p_grad_v + o_row[:, None] * (heads * V)
        tl.store(p_chunk, b_grad_v.to(p_grad_v.dtype.element_ty), mask=m_values)

        b_scaled = ((b_left * b_norm_q)[:, None] * b_grad_out.to(tl.float32)).to(OPERAND)
        b_grad_predicted = -(b_left * b_norm_k)[:, None] * b_grad_v
        b_grad *= tl.exp(b_last)
        b_grad += tl.dot(tl.trans(b_q), b_scaled, input_precision=PRECISION)
        b_grad = add_split_right(b_grad, tl.trans(b_k), b_grad_predicted, OPERAND, PRECISION)

    if p_grad_before is not None:
        p_grad_before += (i_sequence * heads + i_head) * K * V
        tl.store(p_grad_before + o_k[:, None] * V + o_v[None, :], b_grad, mask=m_state)


@triton.jit
def _add_square_products(
    b_grad_scores, b_grad_mixed, b_predicted_sums,
    p_states, p_v, p_grad_v, p_grad_out, p_updates, p_grad_updates,
    b_k, b_left, m_row, m_k, o_c, o_k, column, first_row,
    v_dim, grad_out_dim,
    V: tl.constexpr, BLOCK_V: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of BLOCK_V columns of V to the sums of squares_kernel."""
    o_v = (column + tl.arange(0, BLOCK_V)).to(tl.int64)[None, :]
    m_v = o_v < V
    m_values = m_row[:, None] & m_v
    o_state = o_k.to(tl.int32)[:, None] * V + o_v.to(tl.int32)
    o_values = first_row * V + o_c[:, None] * V + o_v
    b_state = tl.load(p_states + o_state, mask=m_k[:, None] & m_v, other=0.0)
    b_v = tl.load(p_v + o_v * v_dim, mask=m_values, other=0.0).to(tl.float32)
    b_grad_v = tl.load(p_grad_v + o_v, mask=m_values, other=0.0).to(tl.float32)
    b_grad_out = tl.load(p_grad_out + o_v * grad_out_dim, mask=m_values, other=0.0).to(OPERAND)
    b_updates = tl.load(p_updates + o_values, mask=m_v, other=0.0)
    b_grad_updates = tl.load(p_grad_updates + o_values, mask=m_v, other=0.0)
    b_predicted = tl.dot(b_k, b_state, input_precision=PRECISION)
    b_predicted_sums += tl.sum((-b_left * b_grad_v).to(OPERAND).to(tl.float32) * b_predicted, 1)
    b_residual = b_v - b_left * b_predicted
    b_high, b_low = split(b_updates, OPERAND)
    b_out = tl.trans(b_grad_out)
    b_grad_scores = add_split_left(b_grad_scores, b_high, b_low, b_out, OPERAND, PRECISION)
    b_high, b_low = split(b_residual, OPERAND)
    b_high_y, b_low_y = split(b_grad_updates, OPERAND)
    b_high_y, b_low_y = tl.trans(b_high_y), tl.trans(b_low_y)
    b_grad_mixed = add_split(b_grad_mixed, b_high, b_low, b_high_y, b_low_y, OPERAND, PRECISION)
    return b_grad_scores, b_grad_mixed, b_predicted_sums


@triton.jit(do_not_specialize=RUNTIME)
def squares_kernel(
    p_k,  # [batch, seqlen, heads // group, K]
    p_v,  # [batch, seqlen, heads, V]
    p_cu_seqlens,
    p_mixed,  # of chunk_kernel, as the next two
    p_scores,
    p_rows,
    p_states,  # of chain_kernel
    p_updates,
    p_grad_out,  # [batch, seqlen, heads, V]
    p_grad_updates,  # of reverse_kernel
    p_grad_v,
    p_grad_scores,  # of Q K^T, transposed, split [slots, heads, 2, CHUNK, CHUNK], written
    p_grad_gram,  # of K K^T, laid out likewise, written
    p_grad_sums,  # of G [slots, heads, CHUNK], in part, contiguous, written
    p_predicted_sums,  # sums over V of K S times its gradient, laid out likewise, written
    p_grad_beta,  # [batch, seqlen, heads], contiguous, written
    k_batch, k_row, k_head, k_dim,
    v_batch, v_row, v_head, v_dim,
    cu_seqlens_stride,
    grad_out_batch, grad_out_row, grad_out_head, grad_out_dim,
    seqlen, sequences, first_step, heads, group,
    K: tl.constexpr, V: tl.constexpr, SIGMOID: tl.constexpr, BETA_SCALE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid is all heads of all slots, on one axis."""
    i_head = (tl.program_id(0) % heads).to(tl.int64)
    slot = (tl.program_id(0) // heads).to(tl.int64)
    i_sequence, row, end = chunk_coordinate(
        p_cu_seqlens, cu_seqlens_stride, slot, seqlen, sequences, first_step, CHUNK
    )
    if row >= end:  # no chunk has this slot
        return
    i_batch = i_sequence if p_cu_seqlens is None else i_sequence * 0
    o_c = tl.arange(0, CHUNK)
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    o_row = row + o_c
    m_row = o_row < end
    m_k = o_k < K
    m_rows = m_row[:, None] & m_k[None, :]

    p_k += i_batch * k_batch + i_head // group * k_head
    p_k += o_row[:, None] * k_row + o_k[None, :] * k_dim
    p_v += i_batch * v_batch + i_head * v_head + o_row[:, None] * v_row
    p_grad_out += i_batch * grad_out_batch + i_head * grad_out_head
    p_grad_out += o_row[:, None] * grad_out_row
    row_of_all = i_batch * seqlen + o_row
    p_grad_v += (row_of_all * heads + i_head)[:, None] * V
    first_row = (slot * heads + i_head) * CHUNK
    p_states += (slot * heads + i_head) * K * V
    b_k = tl.load(p_k, mask=m_rows, other=0.0).to(OPERAND)
    p_rows += first_row * 4 + o_c
    b_sums, b_beta = tl.load(p_rows), tl.load(p_rows + CHUNK)
    b_norm_q, b_norm_k = tl.load(p_rows + 2 * CHUNK), tl.load(p_rows + 3 * CHUNK)
    b_left = (tl.exp(b_sums) * b_norm_k)[:, None]

    b_grad_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    b_grad_mixed = tl.zeros([CHUNK, CHUNK], tl.float32)
    b_predicted_sums = tl.zeros([CHUNK], tl.float32)
    for column in range(0, V, BLOCK_V):
        b_grad_scores, b_grad_mixed, b_predicted_sums = _add_square_products(
            *(b_grad_scores, b_grad_mixed, b_predicted_sums),
            *(p_states, p_v, p_grad_v, p_grad_out, p_updates, p_grad_updates),
            *(b_k, b_left, m_row, m_k, o_c, o_k, column, first_row),
            *(v_dim, grad_out_dim, V, BLOCK_V, OPERAND, PRECISION),
        )

    b_decay = decays(b_sums, o_c, True)
    o_transposed = first_row * 2 * CHUNK + o_c[None, :] * CHUNK + o_c[:, None]
    o_square = first_row * 2 * CHUNK + o_c[:, None] * CHUNK + o_c[None, :]
    b_high, b_low = load_split(p_scores + o_transposed, CHUNK, OPERAND)
    b_products = b_grad_scores * join(b_high, b_low, OPERAND)
    b_grad_scores *= b_norm_k[:, None] * b_norm_q[None, :] * b_decay
    store_split(p_grad_scores + o_square, b_grad_scores, CHUNK, OPERAND)

    b_high, b_low = load_split(p_mixed + o_transposed, CHUNK, OPERAND)
    b_grad_beta = tl.sum(b_grad_mixed * join(b_high, b_low, OPERAND), 1)
    b_mixed, b_mixed_low = load_split(p_mixed + o_square, CHUNK, OPERAND)
    b_high, b_low = split(b_grad_mixed * b_beta[:, None], OPERAND)
    b_zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
    b_system = add_split(b_zeros, b_mixed, b_mixed_low, b_high, b_low, OPERAND, PRECISION)
    b_high, b_low = split(b_system, OPERAND)
    b_system = -add_split(b_zeros, b_high, b_low, b_mixed, b_mixed_low, OPERAND, PRECISION)
    b_decay *= b_norm_k[:, None] * b_norm_k[None, :]
    b_system = tl.where(o_c[:, None] < o_c[None, :], b_system * b_decay, 0.0)
    b_gram = b_system * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_grad_beta += tl.sum(b_gram, 0)
    b_products += b_gram * b_beta[None, :]
    store_split(p_grad_gram + o_square, b_system * b_beta[None, :], CHUNK, OPERAND)
    tl.store(p_grad_sums + first_row + o_c, tl.sum(b_products, 0) - tl.sum(b_products, 1))
    tl.store(p_predicted_sums + first_row + o_c, b_predicted_sums)
    if SIGMOID:
        b_grad_beta *= b_beta * (1.0 - b_beta / BETA_SCALE)
    p_grad_beta += row_of_all * heads + i_head
    tl.store(p_grad_beta, b_grad_beta.to(p_grad_beta.dtype.element_ty), mask=m_row)


@triton.jit
def _add_state_products(
    b_grad_q, b_grad_k, b_state_product,
    p_states, p_grad_states, p_grad_out, p_grad_v, p_updates,
    b_left_q, b_left_k, b_right, m_row, m_k, o_c, o_k, column, first_row,
    slot, i_head, row_of_all, heads, grad_out_head, grad_out_dim,
    K: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of BLOCK_V columns of V with states to the sums of rows_kernel."""
    o_v = (column + tl.arange(0, BLOCK_V)).to(tl.int64)[None, :]
    m_v = o_v < V
    m_values = m_row[:, None] & m_v
    m_state = m_k[:, None] & m_v
    o_state = o_k.to(tl.int32)[:, None] * V + o_v.to(tl.int32)
    state_offset = (slot * heads + i_head) * K * V
    b_state = tl.load(p_states + state_offset + o_state, mask=m_state, other=0.0)
    p_state = p_grad_states + state_offset + o_state
    b_grad_state = tl.load(p_state, mask=m_state, other=0.0)
    b_state_product += tl.sum(b_state.to(tl.float32) * b_grad_state.to(tl.float32), 1)
    p_x = p_grad_out + i_head * grad_out_head + o_v * grad_out_dim
    b_x = tl.load(p_x, mask=m_values, other=0.0).to(tl.float32)
    b_x = (b_left_q * b_x).to(OPERAND)
    b_grad_q += tl.dot(b_x, tl.trans(b_state), input_precision=PRECISION)
    p_x = p_grad_v + (row_of_all * heads + i_head)[:, None] * V + o_v
    b_x = tl.load(p_x, mask=m_values, other=0.0).to(tl.float32)
    b_x = (b_left_k * b_x).to(OPERAND)
    b_grad_k += tl.dot(b_x, tl.trans(b_state), input_precision=PRECISION)
    b_x = tl.load(p_updates + (first_row + o_c[:, None]) * V + o_v, mask=m_v, other=0.0)
    b_x = (b_right * b_x.to(tl.float32)).to(OPERAND)
    b_grad_k += tl.dot(b_x, tl.trans(b_grad_state), input_precision=PRECISION)
    return b_grad_q, b_grad_k, b_state_product


@triton.jit
def _write_gate_gradients(
    p_g, p_a_log, p_dt_bias, p_grad_g, p_grad_a_log, p_grad_dt_bias, b_grad_g, m_row
):
    """Write the gradient of a head's gates, and the chunk's part of those of A_log and dt_bias."""
    b_g = tl.load(p_g, mask=m_row, other=0.0).to(tl.float32)
    b_grad_g, b_grad_a_log = gate_backward(b_g, b_grad_g, p_a_log, p_dt_bias)
    tl.store(p_grad_g, b_grad_g.to(p_grad_g.dtype.element_ty), mask=m_row)
    if p_grad_a_log is not None:
        tl.store(p_grad_a_log, tl.sum(tl.where(m_row, b_grad_a_log, 0.0), 0))
    if p_grad_dt_bias is not None:
        tl.store(p_grad_dt_bias, tl.sum(tl.where(m_row, b_grad_g, 0.0), 0))


@triton.jit
def _head_of(p_x, offset):
    """A pointer plus `offset` elements, or None."""
    p_head = p_x
    if p_x is not None:
        p_head += offset
    return p_head


@triton.jit(do_not_specialize=RUNTIME)
def rows_kernel(
    p_q,  # [batch, seqlen, heads // group, K]
    p_k,
    p_g,  # [batch, seqlen, heads]; None: zeros
    p_a_log,  # [heads]; None: g is the gate
    p_dt_bias,  # [heads]; None: zeros
    p_cu_seqlens,
    p_rows,  # of chunk_kernel
    p_states,  # of chain_kernel
    p_updates,
    p_grad_out,  # [batch, seqlen, heads, V]
    p_grad_states,  # of reverse_kernel
    p_grad_v,
    p_grad_scores,  # of squares_kernel
    p_grad_gram,
    p_grad_sums,
    p_predicted_sums,
    p_grad_q,  # [batch, seqlen, heads // group, K], contiguous, written, as the next
    p_grad_k,
    p_grad_g,  # [batch, seqlen, heads], contiguous, written; None: not written
    p_grad_a_log,  # [slots, heads], contiguous: a chunk's part, written; None: not written
    p_grad_dt_bias,  # like that
    q_batch, q_row, q_head, q_dim,
    k_batch, k_row, k_head, k_dim,
    g_batch, g_row, g_head,
    a_log_head, dt_bias_head, cu_seqlens_stride,
    grad_out_batch, grad_out_row, grad_out_head, grad_out_dim,
    seqlen, sequences, first_step, heads, group,
    K: tl.constexpr, V: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid is all heads of q of all slots, on one axis.

    Over 100 lines, 40 of which are parameters.
    """
    qk_heads = heads // group
    i_qk_head = (tl.program_id(0) % qk_heads).to(tl.int64)
    slot = (tl.program_id(0) // qk_heads).to(tl.int64)
    i_sequence, row, end = chunk_coordinate(
        p_cu_seqlens, cu_seqlens_stride, slot, seqlen, sequences, first_step, CHUNK
    )
    if row >= end:  # no chunk has this slot
        return
    i_batch = i_sequence if p_cu_seqlens is None else i_sequence * 0
    o_c = tl.arange(0, CHUNK)
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    o_row = row + o_c
    m_row = o_row < end
    m_k = o_k < K
    m_rows = m_row[:, None] & m_k[None, :]
    row_of_all = i_batch * seqlen + o_row
    p_q += i_batch * q_batch + i_qk_head * q_head + o_row[:, None] * q_row + o_k[None, :] * q_dim
    p_k += i_batch * k_batch + i_qk_head * k_head + o_row[:, None] * k_row + o_k[None, :] * k_dim
    p_grad_out += i_batch * grad_out_batch + o_row[:, None] * grad_out_row

    b_grad_q = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    b_grad_k = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    # Dot product of each row of q, and of k, with its gradient so far.
    b_product_q = tl.zeros([CHUNK], tl.float32)
    b_product_k = tl.zeros([CHUNK], tl.float32)
    for i in range(0, group):
        i_head = i_qk_head * group + i
        first_row = (slot * heads + i_head) * CHUNK
        b_sums = tl.load(p_rows + first_row * 4 + o_c)
        b_norm_q = tl.load(p_rows + first_row * 4 + 2 * CHUNK + o_c)
        b_norm_k = tl.load(p_rows + first_row * 4 + 3 * CHUNK + o_c)
        b_last = tl.load(p_rows + first_row * 4 + CHUNK - 1)
        b_left_q = (tl.exp(b_sums) * b_norm_q)[:, None]
        b_left_k = (-tl.exp(b_sums) * b_norm_k)[:, None]
        b_right = (tl.exp(b_last - b_sums) * b_norm_k)[:, None]
        b_state_product = tl.zeros([BLOCK_K], tl.float32)
        for column in range(0, V, BLOCK_V):
            b_grad_q, b_grad_k, b_state_product = _add_state_products(
                *(b_grad_q, b_grad_k, b_state_product),
                *(p_states, p_grad_states, p_grad_out, p_grad_v, p_updates),
                *(b_left_q, b_left_k, b_right, m_row, m_k, o_c, o_k, column, first_row),
                *(slot, i_head, row_of_all, heads, grad_out_head, grad_out_dim),
                *(K, V, BLOCK_V, OPERAND, PRECISION),
            )
        # Loaded after the loop, in which they would take too many registers.
        b_q = tl.load(p_q, mask=m_rows, other=0.0).to(OPERAND)
        b_k = tl.load(p_k, mask=m_rows, other=0.0).to(OPERAND)
        # The part of this head's states.
        b_of_q = tl.sum(b_q.to(tl.float32) * b_grad_q, 1) - b_product_q
        b_of_k = tl.sum(b_k.to(tl.float32) * b_grad_k, 1) - b_product_k

        if p_grad_g is not None:
            b_predicted_sums = tl.load(p_predicted_sums + first_row + o_c)
            b_of_k -= b_predicted_sums
            b_grad_g = tl.load(p_grad_sums + first_row + o_c) + b_predicted_sums + b_of_q - b_of_k
            b_grad_g = tl.cumsum(b_grad_g, 0, reverse=True)
            b_grad_g += tl.sum(b_of_k, 0) + tl.exp(b_last) * tl.sum(b_state_product, 0)
            _write_gate_gradients(
                p_g + i_batch * g_batch + o_row * g_row + i_head * g_head,
                _head_of(p_a_log, i_head * a_log_head),
                _head_of(p_dt_bias, i_head * dt_bias_head),
                p_grad_g + row_of_all * heads + i_head,
                _head_of(p_grad_a_log, slot * heads + i_head),
                _head_of(p_grad_dt_bias, slot * heads + i_head),
                *(b_grad_g, m_row),
            )

        o_square = first_row * 2 * CHUNK + o_c[:, None] * CHUNK + o_c[None, :]
        b_high, b_low = load_split(p_grad_scores + o_square, CHUNK, OPERAND)
        b_grad_q = add_split_left(
            b_grad_q, tl.trans(b_high), tl.trans(b_low), b_k, OPERAND, PRECISION
        )
        b_grad_k = add_split_left(b_grad_k, b_high, b_low, b_q, OPERAND, PRECISION)
        b_high, b_low = load_split(p_grad_gram + o_square, CHUNK, OPERAND)
        b_grad_k = add_split_left(
            b_grad_k, tl.trans(b_high), tl.trans(b_low), b_k, OPERAND, PRECISION
        )
        b_grad_k = add_split_left(b_grad_k, b_high, b_low, b_k, OPERAND, PRECISION)
        b_product_q = tl.sum(b_q.to(tl.float32) * b_grad_q, 1)
        b_product_k = tl.sum(b_k.to(tl.float32) * b_grad_k, 1)

    if L2NORM:
        b_q = tl.load(p_q, mask=m_rows, other=0.0)
        b_k = tl.load(p_k, mask=m_rows, other=0.0)
        b_norm_q = norm_factors(tl.trans(b_q), L2NORM, EPS)
        b_norm_k = norm_factors(tl.trans(b_k), L2NORM, EPS)
        b_product_q *= b_norm_q * b_norm_q
        b_product_k *= b_norm_k * b_norm_k
        b_grad_q -= b_product_q[:, None] * b_q.to(tl.float32)
        b_grad_k -= b_product_k[:, None] * b_k.to(tl.float32)
    o_rows = (row_of_all * qk_heads + i_qk_head)[:, None] * K + o_k[None, :]
    tl.store(p_grad_q + o_rows, b_grad_q.to(p_grad_q.dtype.element_ty), mask=m_rows)
    tl.store(p_grad_k + o_rows, b_grad_k.to(p_grad_k.dtype.element_ty), mask=m_rows)
