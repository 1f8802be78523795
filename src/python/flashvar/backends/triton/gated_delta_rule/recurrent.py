"""The Triton kernel of the gated delta rule token by token: for decoding and short sequences.

A program iterates over one sequence, with BLOCK_V columns of one head's state in registers. Columns
are independent of each other, so programs exchange nothing.
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

from flashvar.backends.triton.gated_delta_rule.activations import beta_of, gate_of, normalised
from flashvar.backends.triton.gated_delta_rule.chunks import RUNTIME as CHUNK_RUNTIME
from flashvar.backends.triton.gated_delta_rule.chunks import bounds

# Arguments that change from call to call: kernels are not specialized for their values.
RUNTIME: Final = (*CHUNK_RUNTIME, "pool", "indices_stride")


@triton.jit(do_not_specialize=RUNTIME)
def recurrent_kernel(
    p_q,  # [batch, seqlen, heads // group, K]
    p_k,
    p_v,  # [batch, seqlen, heads, V]
    p_g,  # [batch, seqlen, heads]; None: zeros
    p_beta,  # [batch, seqlen, heads]
    p_a_log,  # [heads]; None: g is the gate
    p_dt_bias,  # [heads]; None: zeros
    p_cu_seqlens,  # [sequences + 1]; None: each batch is a sequence
    p_indices,  # [sequences]: indices of states in the pool; None: sequence i has state i
    p_before,  # [pool, heads, K, V]; None: zeros
    p_after,  # like p_before; may be the same tensor
    p_out,  # [batch, seqlen, heads, V]
    q_batch, q_row, q_head, q_dim,
    k_batch, k_row, k_head, k_dim,
    v_batch, v_row, v_head, v_dim,
    g_batch, g_row, g_head,
    beta_batch, beta_row, beta_head,
    a_log_head, dt_bias_head, cu_seqlens_stride, indices_stride,
    before_state, before_head, before_k, before_v,
    after_state, after_head, after_k, after_v,
    out_batch, out_row, out_head,
    seqlen, pool, scale, heads, group,
    K: tl.constexpr, V: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr,
    BETA_SCALE: tl.constexpr, EPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Iterates over a sequence. Grid: sequences x heads x column blocks, on one axis."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_block = tl.program_id(0) % blocks
    i_head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    i_sequence = (tl.program_id(0) // (blocks * heads)).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    o_v = i_block * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m_v = o_v < V
    m_state = m_k[:, None] & m_v[None, :]

    begin, end = bounds(p_cu_seqlens, cu_seqlens_stride, i_sequence, seqlen)
    i_batch = i_sequence if p_cu_seqlens is None else i_sequence * 0
    i_state = i_sequence
    if p_indices is not None:
        i_state = tl.load(p_indices + i_sequence * indices_stride).to(tl.int64)
    m_valid = m_state & (i_state >= 0) & (i_state < pool)

    o_k64, o_v64 = o_k.to(tl.int64), o_v.to(tl.int64)
    b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if p_before is not None:
        p_state = p_before + i_state * before_state + i_head * before_head
        p_state += o_k64[:, None] * before_k + o_v64[None, :] * before_v
        b_state = tl.load(p_state, mask=m_valid, other=0.0).to(tl.float32)
    if p_a_log is not None:
        p_a_log += i_head * a_log_head
    if p_dt_bias is not None:
        p_dt_bias += i_head * dt_bias_head

    p_q += i_batch * q_batch + begin * q_row + i_head // group * q_head + o_k64 * q_dim
    p_k += i_batch * k_batch + begin * k_row + i_head // group * k_head + o_k64 * k_dim
    p_v += i_batch * v_batch + begin * v_row + i_head * v_head + o_v64 * v_dim
    p_out += i_batch * out_batch + begin * out_row + i_head * out_head + o_v64
    p_beta += i_batch * beta_batch + begin * beta_row + i_head * beta_head
    if p_g is not None:
        p_g += i_batch * g_batch + begin * g_row + i_head * g_head

    for _ in range(begin, end):
        b_q = tl.load(p_q, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
        b_beta = tl.load(p_beta).to(tl.float32)
        if L2NORM:
            b_q = normalised(b_q, EPS)
            b_k = normalised(b_k, EPS)
        b_beta = beta_of(b_beta, SIGMOID, BETA_SCALE)
        if p_g is not None:
            b_g = tl.load(p_g).to(tl.float32)
            b_state *= tl.exp(gate_of(b_g, p_a_log, p_dt_bias))
            p_g += g_row
        b_update = b_beta * (b_v - tl.sum(b_state * b_k[:, None], 0))
        b_state += b_k[:, None] * b_update[None, :]
        b_out = scale * tl.sum(b_state * b_q[:, None], 0)
        tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_v)
        p_q += q_row
        p_k += k_row
        p_v += v_row
        p_beta += beta_row
        p_out += out_row

    p_state = p_after + i_state * after_state + i_head * after_head
    p_state += o_k64[:, None] * after_k + o_v64[None, :] * after_v
    tl.store(p_state, b_state.to(p_after.dtype.element_ty), mask=m_valid)
