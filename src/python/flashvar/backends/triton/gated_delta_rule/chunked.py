"""The Triton kernels of the gated delta rule in chunks of tokens, by matrix products.

Names and formulas are those of flashvar.backends.reference.gated_delta_rule.chunked. The inverses,
which no state enters, come first and for all chunks at once; then a program goes through the
chunks of a sequence with BLOCK_V columns of a head's state in registers.

A chunk of a sequence that begins at row b has the slot b // CHUNK + (number of the sequence) + (its
own number) in what the first kernel writes: no two have the same, and no length is needed on the
host.
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

# They change from call to call: one kernel serves all of their values.
RUNTIME: Final = ("seqlen", "sequences", "first_step", "scale")
_BLOCK: Final = tl.constexpr(16)
# exp of it is 0: sums of gates stay finite.
_LOWEST_GATE: Final = tl.constexpr(-104.0)


@triton.jit
def _ends(p_cu_seqlens, cu_seqlens_place, i_sequence, seqlen):
    """The first row of a sequence, counted from that of its batch, and the row behind its last."""
    begin = i_sequence * 0
    end = begin + seqlen
    if p_cu_seqlens is not None:
        p_cu_seqlens += i_sequence * cu_seqlens_place
        # Offsets beyond the rows would read other memory.
        begin = tl.maximum(tl.load(p_cu_seqlens).to(tl.int64), 0)
        end = tl.minimum(tl.load(p_cu_seqlens + cu_seqlens_place).to(tl.int64), seqlen)
    return begin, end


@triton.jit
def _slots(begin, i_sequence, seqlen, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """The slot of the first chunk of a sequence."""
    slot = i_sequence * ((seqlen + CHUNK - 1) // CHUNK)
    if PACKED:
        slot = begin // CHUNK + i_sequence
    return slot


@triton.jit
def _sequence_of(
    p_cu_seqlens, cu_seqlens_place, slot, seqlen, sequences, first_step, CHUNK: tl.constexpr
):
    """The last sequence whose first slot is not behind a slot."""
    if p_cu_seqlens is None:
        i_sequence = slot // ((seqlen + CHUNK - 1) // CHUNK)
    else:
        i_sequence = slot * 0
        step = first_step
        while step > 0:
            probe = i_sequence + step
            m_probe = probe < sequences
            begin = tl.load(p_cu_seqlens + probe * cu_seqlens_place, mask=m_probe, other=0)
            before = m_probe & (begin.to(tl.int64) // CHUNK + probe <= slot)
            i_sequence = tl.where(before, probe, i_sequence)
            step = step // 2
    return i_sequence


@triton.jit
def _inverse(b_a, CHUNK: tl.constexpr):
    """inverse(I + a) of a strictly lower matrix, by forward substitution in two levels.

    Diagonal blocks of 16 go row by row, all at once. Of the blocks below, each iteration makes one
    more row final, from rows that are: x = d (I - l x).
    """
    blocks: tl.constexpr = CHUNK // _BLOCK
    o_c = tl.arange(0, CHUNK)
    same = (o_c // _BLOCK)[:, None] == (o_c // _BLOCK)[None, :]
    one = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    b_whole = tl.reshape(tl.where(same, b_a, 0.0), [blocks, _BLOCK, blocks, _BLOCK])
    b_diagonal = tl.sum(b_whole, 2)  # [block, row, column]: the others are 0
    o_b = tl.arange(0, _BLOCK)
    b_x = tl.where(o_b[:, None] == o_b[None, :], 1.0, 0.0)[None, :, :] + b_diagonal * 0.0
    for row in range(1, _BLOCK):
        m_row = o_b[None, :, None] == row
        b_row = tl.sum(tl.where(m_row, b_diagonal, 0.0), 1)  # [block, column]
        b_new = tl.sum(b_row[:, :, None] * b_x, 1)
        b_x = tl.where(m_row, b_x - b_new[:, None, :], b_x)
    b_spread = tl.broadcast_to(b_x[:, :, None, :], [blocks, _BLOCK, blocks, _BLOCK])
    b_d = tl.where(same, tl.reshape(b_spread, [CHUNK, CHUNK]), 0.0)
    b_l = tl.where(same, 0.0, b_a)
    b_x = b_d
    for _ in range(1, blocks):
        b_y = one - tl.dot(b_l, b_x, input_precision="tf32x3")
        b_x = tl.dot(b_d, b_y, input_precision="tf32x3")
    return b_x


@triton.jit(do_not_specialize=RUNTIME)
def inverse_kernel(
    p_k,  # [batch, seqlen, heads // GROUP, K]
    p_g,  # [batch, seqlen, heads]; None: zeros
    p_beta,  # [batch, seqlen, heads]
    p_a_log,  # [heads]; None: g is the gate
    p_dt_bias,  # [heads]; None: zeros
    p_cu_seqlens,  # [sequences + 1]; None: each batch is a sequence
    p_inverse,  # T [slots, HEADS, CHUNK, CHUNK], contiguous, written
    p_sums,  # G [slots, HEADS, CHUNK], contiguous, written
    p_betas,  # beta [slots, HEADS, CHUNK], contiguous, written
    k_batch,
    k_row,
    k_head,
    k_dim,
    g_batch,
    g_row,
    g_head,
    beta_batch,
    beta_row,
    beta_head,
    a_log_head,
    dt_bias_head,
    cu_seqlens_place,
    seqlen,
    sequences,
    first_step,  # of the bisection: the largest power of two below `sequences`, or 0
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The grid is all heads of all slots, on one axis."""
    i_head = (tl.program_id(0) % HEADS).to(tl.int64)
    slot = (tl.program_id(0) // HEADS).to(tl.int64)
    i_sequence = _sequence_of(
        p_cu_seqlens, cu_seqlens_place, slot, seqlen, sequences, first_step, CHUNK
    )
    begin, end = _ends(p_cu_seqlens, cu_seqlens_place, i_sequence, seqlen)
    first = _slots(begin, i_sequence, seqlen, p_cu_seqlens is not None, CHUNK)
    i_batch = i_sequence if p_cu_seqlens is None else i_sequence * 0
    o_c = tl.arange(0, CHUNK)
    o_row = begin + (slot - first) * CHUNK + o_c
    m_row = o_row < end
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)

    p_k += i_batch * k_batch + i_head // GROUP * k_head
    p_k += o_row[:, None] * k_row + o_k[None, :] * k_dim
    b_k = tl.load(p_k, mask=m_row[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)
    if L2NORM:
        b_k = normalised(b_k, EPS)
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
        b_g = tl.where(m_row, tl.maximum(b_g, _LOWEST_GATE, propagate_nan=tl.PropagateNan.ALL), 0.0)

    b_gram = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_a = tl.where(o_c[:, None] > o_c[None, :], b_beta[:, None] * b_gram, 0.0)
    place = (slot * HEADS + i_head) * CHUNK
    tl.store(p_sums + place + o_c, tl.cumsum(b_g, 0))
    tl.store(p_betas + place + o_c, b_beta)
    p_inverse += (place + o_c[:, None]) * CHUNK + o_c[None, :]
    tl.store(p_inverse, _inverse(b_a, CHUNK))


@triton.jit(do_not_specialize=RUNTIME)
def chain_kernel(
    p_q,  # [batch, seqlen, heads // GROUP, K]
    p_k,
    p_v,  # [batch, seqlen, heads, V]
    p_cu_seqlens,
    p_inverse,  # of inverse_kernel, as the next two
    p_sums,
    p_betas,
    p_before,  # [sequences, heads, K, V]; None: zeros
    p_after,  # like before
    p_out,  # [batch, seqlen, heads, V], rows contiguous
    q_batch,
    q_row,
    q_head,
    q_dim,
    k_batch,
    k_row,
    k_head,
    k_dim,
    v_batch,
    v_row,
    v_head,
    v_dim,
    cu_seqlens_place,
    before_place,
    before_head,
    before_k,
    before_v,
    after_place,
    after_head,
    after_k,
    after_v,
    out_batch,
    out_row,
    out_head,
    seqlen,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L2NORM: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The grid is all column blocks of all heads of all sequences, on one axis."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_head = (tl.program_id(0) // blocks % HEADS).to(tl.int64)
    i_sequence = (tl.program_id(0) // (blocks * HEADS)).to(tl.int64)
    o_c = tl.arange(0, CHUNK)
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    o_v = (tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    m_k, m_v = o_k < K, o_v < V
    m_state = m_k[:, None] & m_v[None, :]
    lower = o_c[:, None] >= o_c[None, :]

    begin, end = _ends(p_cu_seqlens, cu_seqlens_place, i_sequence, seqlen)
    slot = _slots(begin, i_sequence, seqlen, p_cu_seqlens is not None, CHUNK)
    i_batch = i_sequence if p_cu_seqlens is None else i_sequence * 0
    p_q += i_batch * q_batch + i_head // GROUP * q_head + o_k[None, :] * q_dim
    p_k += i_batch * k_batch + i_head // GROUP * k_head + o_k[None, :] * k_dim
    p_v += i_batch * v_batch + i_head * v_head + o_v[None, :] * v_dim
    p_out += i_batch * out_batch + i_head * out_head + o_v[None, :]
    b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if p_before is not None:
        p_before += i_sequence * before_place + i_head * before_head
        p_before += o_k[:, None] * before_k + o_v[None, :] * before_v
        b_state = tl.load(p_before, mask=m_state, other=0.0).to(tl.float32)

    for row in range(begin, end, CHUNK):
        o_row = row + o_c.to(tl.int64)
        m_row = (o_row < end)[:, None]
        b_q = tl.load(p_q + o_row[:, None] * q_row, mask=m_row & m_k[None, :], other=0.0)
        b_k = tl.load(p_k + o_row[:, None] * k_row, mask=m_row & m_k[None, :], other=0.0)
        b_v = tl.load(p_v + o_row[:, None] * v_row, mask=m_row & m_v[None, :], other=0.0)
        b_q, b_k, b_v = b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32)
        if L2NORM:
            b_q = normalised(b_q, EPS)
            b_k = normalised(b_k, EPS)
        place = (slot * HEADS + i_head) * CHUNK
        b_sums = tl.load(p_sums + place + o_c)
        b_beta = tl.load(p_betas + place + o_c)
        b_inverse = tl.load(p_inverse + (place + o_c[:, None]) * CHUNK + o_c[None, :])
        b_last = tl.sum(tl.where(o_c == CHUNK - 1, b_sums, 0.0), 0)
        b_left = tl.exp(b_sums)[:, None]
        # Above the diagonal the difference would overflow.
        b_decay = tl.exp(tl.where(lower, b_sums[:, None] - b_sums[None, :], 0.0))
        b_decay = tl.where(lower, b_decay, 0.0)

        b_rest = b_v - b_left * tl.dot(b_k, b_state, input_precision=PRECISION)
        b_new = tl.dot(b_inverse * b_decay, b_beta[:, None] * b_rest, input_precision=PRECISION)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_decay
        b_out = b_left * tl.dot(b_q, b_state, input_precision=PRECISION)
        b_out += tl.dot(b_scores, b_new, input_precision=PRECISION)
        b_out = (scale * b_out).to(p_out.dtype.element_ty)
        tl.store(p_out + o_row[:, None] * out_row, b_out, mask=m_row & m_v[None, :])
        b_kept = tl.exp(b_last - b_sums)[:, None] * b_new
        b_state *= tl.exp(b_last)
        b_state += tl.dot(tl.trans(b_k), b_kept, input_precision=PRECISION)
        slot += 1

    p_after += i_sequence * after_place + i_head * after_head
    p_after += o_k[:, None] * after_k + o_v[None, :] * after_v
    tl.store(p_after, b_state.to(p_after.dtype.element_ty), mask=m_state)
