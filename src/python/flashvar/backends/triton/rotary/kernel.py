"""The Triton kernel of rotary position embeddings.

One program rotates BLOCK_ROWS rows of BLOCK_HEADS heads. Rows are numbered across all sequences, so
that short sequences (decoding) share a block; a packed row finds its sequence by bisection of the
offsets. The entries of the tables for a row are read once for all heads of the block. Elements that
are not rotated (other heads, the rest of the head dim, rows without a position) are copied exactly.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803

# Triton's own language has no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# Arguments that change from call to call; the kernel is not specialised on their values.
_RUNTIME: Final = (
    "rows",
    "seqlen",
    "batch",
    "first_step",
    "positions",
    "offset",
    "heads",
    "rotated_heads",
)


@triton.jit(do_not_specialize=_RUNTIME)
def rotary_kernel(
    p_out,  # like x; it may be x
    p_x,  # [batch, seqlen, heads, HEAD_DIM], or [rows, heads, HEAD_DIM]
    p_cos,  # [positions, PAIRS]
    p_sin,
    p_offsets,  # [batch] integers: added to `offset`; may be None
    p_cu_seqlens,  # [batch + 1] integers; None: sequences of one length
    out_batch,
    out_row,
    out_head,
    out_dim,
    x_batch,
    x_row,
    x_head,
    x_dim,
    cos_row,
    sin_row,
    rows,
    seqlen,
    batch,
    first_step,  # first step of the bisection: the largest power of two below `batch`, or 0
    positions,
    offset,
    heads,
    rotated_heads,  # heads from here on are copied
    PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    COPY: tl.constexpr,  # out is not x
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Compute one block. The grid is one-dimensional; blocks of the same rows are adjacent."""
    blocks = tl.cdiv(heads, BLOCK_HEADS)
    o_row = tl.program_id(0) // blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_head = tl.program_id(0) % blocks * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    m_row = o_row < rows
    if p_cu_seqlens is None:
        i_sequence = o_row // seqlen
        row = o_row % seqlen
        p_x += i_sequence.to(tl.int64)[:, None, None] * x_batch
        p_out += i_sequence.to(tl.int64)[:, None, None] * out_batch
        o_x = row.to(tl.int64)
        known = m_row
    else:
        i_sequence, row, known = _sequence_of(p_cu_seqlens, o_row, batch, first_step)
        known &= m_row
        o_x = o_row.to(tl.int64)
    position = row + offset
    if p_offsets is not None:
        position += tl.load(p_offsets + i_sequence, mask=known, other=0)
    known &= (position >= 0) & (position < positions)
    p_x += o_x[:, None, None] * x_row + o_head.to(tl.int64)[None, :, None] * x_head
    p_out += o_x[:, None, None] * out_row + o_head.to(tl.int64)[None, :, None] * out_head
    m_head = m_row[:, None, None] & (o_head < heads)[None, :, None]
    m_rotated = known[:, None, None] & (o_head < rotated_heads)[None, :, None]

    o_pair = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    # In halves each thread loads the table entries of its own pairs. Interleaved, the pairs of a
    # thread are not contiguous in the tables. Loading the tables in the layout of x would force a
    # layout conversion of x; converting the tables, which are shared by all heads, is cheaper.
    m_known = known[:, None, None] if INTERLEAVED else m_rotated
    m_table = m_known & (o_pair < PAIRS)
    o_table = position.to(tl.int64)[:, None, None]
    if not INTERLEAVED:
        o_table = tl.broadcast_to(o_table, [BLOCK_ROWS, BLOCK_HEADS, 1])
    b_cos = tl.load(p_cos + o_table * cos_row + o_pair, mask=m_table, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_table * sin_row + o_pair, mask=m_table, other=0.0).to(tl.float32)
    if CONJUGATE:
        b_sin = -b_sin
    m_half = m_head & (o_pair < PAIRS)
    o_both = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
    m_both = m_head & (o_both < 2 * PAIRS)
    if INTERLEAVED:
        b_both = tl.load(p_x + o_both * x_dim, mask=m_both, other=0.0)
        b_both = tl.reshape(b_both, [BLOCK_ROWS, BLOCK_HEADS, BLOCK_PAIRS, 2])
        b_first, b_second = tl.split(b_both)
    else:
        b_first = tl.load(p_x + o_pair * x_dim, mask=m_half, other=0.0)
        b_second = tl.load(p_x + (o_pair + PAIRS) * x_dim, mask=m_half, other=0.0)
    b_x = b_first.to(tl.float32)
    b_y = b_second.to(tl.float32)
    b_first_rotated = (b_x * b_cos - b_y * b_sin).to(b_first.dtype)
    b_second_rotated = (b_x * b_sin + b_y * b_cos).to(b_first.dtype)
    b_first = tl.where(m_rotated, b_first_rotated, b_first)
    b_second = tl.where(m_rotated, b_second_rotated, b_second)
    if INTERLEAVED:
        b_both = tl.join(b_first, b_second)
        b_both = tl.reshape(b_both, [BLOCK_ROWS, BLOCK_HEADS, 2 * BLOCK_PAIRS])
        tl.store(p_out + o_both * out_dim, b_both, mask=m_both)
    else:
        tl.store(p_out + o_pair * out_dim, b_first, mask=m_half)
        tl.store(p_out + (o_pair + PAIRS) * out_dim, b_second, mask=m_half)
    if COPY:
        for start in tl.static_range(2 * PAIRS, HEAD_DIM, 2 * BLOCK_PAIRS):
            m_rest = m_head & (start + o_both < HEAD_DIM)
            b_rest = tl.load(p_x + (start + o_both) * x_dim, mask=m_rest, other=0.0)
            tl.store(p_out + (start + o_both) * out_dim, b_rest, mask=m_rest)


@triton.jit
def _sequence_of(p_cu_seqlens, o_row, batch, first_step):
    """The sequence of each packed row, the row's index in it, and whether it has a sequence."""
    i_sequence = tl.zeros_like(o_row)
    step = first_step
    while step > 0:
        probe = i_sequence + step
        begin = tl.load(p_cu_seqlens + probe, mask=probe < batch, other=2147483647)
        i_sequence = tl.where(begin <= o_row, probe, i_sequence)
        step = step // 2
    m_sequence = i_sequence < batch
    begin = tl.load(p_cu_seqlens + i_sequence, mask=m_sequence, other=0)
    end = tl.load(p_cu_seqlens + i_sequence + 1, mask=m_sequence, other=0)
    row = o_row - begin.to(tl.int32)
    return i_sequence, row, (o_row >= begin) & (o_row < end)
