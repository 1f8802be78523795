"""Locates the chunks of sequences; helpers for a chunk's matrices that all kernels share.

Chunk n of sequence i, which begins at row b, has slot b // CHUNK + i + n in scratch memory. No two
chunks have the same slot, and the host needs no lengths of sequences.

Scratch memory has four values for each row of a chunk: G, beta, scale times the factor that
normalizes q, and the factor that normalizes k. Without qk_l2norm these factors are 1.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803, SIM300
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# Arguments that change from call to call, or whose values do not help the compiler: kernels are not
# specialized for them.
RUNTIME: Final = (
    *("seqlen", "sequences", "first_step", "scale", "heads", "group", "cu_seqlens_stride"),
    *("g_batch", "g_row", "g_head", "beta_batch", "beta_row", "beta_head"),
    *("a_log_head", "dt_bias_head"),
)


@triton.jit
def bounds(p_cu_seqlens, cu_seqlens_stride, i_sequence, seqlen):
    """The first row of a sequence in its batch entry, and the row after its last."""
    begin = i_sequence * 0
    end = begin + seqlen
    if p_cu_seqlens is not None:
        p_cu_seqlens += i_sequence * cu_seqlens_stride
        # Offsets beyond the rows would read other memory.
        begin = tl.maximum(tl.load(p_cu_seqlens).to(tl.int64), 0)
        end = tl.minimum(tl.load(p_cu_seqlens + cu_seqlens_stride).to(tl.int64), seqlen)
    return begin, end


@triton.jit
def first_slot(begin, i_sequence, seqlen, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """The slot of the first chunk of a sequence."""
    slot = i_sequence * ((seqlen + CHUNK - 1) // CHUNK)
    if PACKED:
        slot = begin // CHUNK + i_sequence
    return slot


@triton.jit
def sequence_of(
    p_cu_seqlens, cu_seqlens_stride, slot, seqlen, sequences, first_step, CHUNK: tl.constexpr
):
    """The last sequence whose first slot is not after `slot`."""
    if p_cu_seqlens is None:
        i_sequence = slot // ((seqlen + CHUNK - 1) // CHUNK)
    else:
        i_sequence = slot * 0
        step = first_step
        while step > 0:
            probe = i_sequence + step
            m_probe = probe < sequences
            begin = tl.load(p_cu_seqlens + probe * cu_seqlens_stride, mask=m_probe, other=0)
            before = m_probe & (begin.to(tl.int64) // CHUNK + probe <= slot)
            i_sequence = tl.where(before, probe, i_sequence)
            step = step // 2
    return i_sequence


@triton.jit
def chunk_coordinate(
    p_cu_seqlens, cu_seqlens_stride, slot, seqlen, sequences, first_step, CHUNK: tl.constexpr
):
    """The sequence of a slot, the first row of its chunk, and the row after the sequence's last.

    Slots without a chunk: the first row is not before the row after the last.
    """
    i_sequence = sequence_of(
        p_cu_seqlens, cu_seqlens_stride, slot, seqlen, sequences, first_step, CHUNK
    )
    begin, end = bounds(p_cu_seqlens, cu_seqlens_stride, i_sequence, seqlen)
    first = first_slot(begin, i_sequence, seqlen, p_cu_seqlens is not None, CHUNK)
    return i_sequence, begin + (slot - first) * CHUNK, end


@triton.jit
def norm_factors(b_x, L2NORM: tl.constexpr, EPS: tl.constexpr):
    """The factor of each row that makes its norm 1, or ones. Takes rows transposed, [K, C].

    Triton 3.6 fails to compile sums along rows of [C, K] at some K that are not multiples of 16.

    GEMMs take the rows as they are, and their results are scaled: normalized rows, rounded to 16
    bits, would not have norm 1, and where keys are equal that error grows exponentially with the
    number of tokens.
    """
    b_factor = tl.full([b_x.shape[1]], 1.0, tl.float32)
    if L2NORM:
        b_x = b_x.to(tl.float32)
        b_factor = tl.rsqrt(tl.sum(b_x * b_x, 0) + EPS)
    return b_factor


@triton.jit
def decays(b_sums, o_c, TRANSPOSED: tl.constexpr):
    """D [row, column], exp(G[row] - G[column]) on and below the diagonal, or its transpose."""
    b_between = b_sums[:, None] - b_sums[None, :]
    # On the other side of the diagonal exp() would overflow.
    if TRANSPOSED:
        b_between = tl.where(o_c[:, None] <= o_c[None, :], -b_between, float("-inf"))
    else:
        b_between = tl.where(o_c[:, None] >= o_c[None, :], b_between, float("-inf"))
    return tl.exp(b_between)


@triton.jit
def split(b_x, OPERAND: tl.constexpr):
    """The high and the low part of a float32 matrix in the operand dtype; float32: low is 0."""
    b_high = b_x.to(OPERAND)
    return b_high, (b_x - b_high.to(tl.float32)).to(OPERAND)


@triton.jit
def store_split(p_x, b_x, CHUNK: tl.constexpr, OPERAND: tl.constexpr):
    """Store both parts, [2, CHUNK, CHUNK], contiguous; float32: the high part alone."""
    b_high, b_low = split(b_x, OPERAND)
    tl.store(p_x, b_high)
    if OPERAND != tl.float32:
        tl.store(p_x + CHUNK * CHUNK, b_low)


@triton.jit
def load_split(p_x, CHUNK: tl.constexpr, OPERAND: tl.constexpr):
    """Load what store_split() stored; float32: the low part is not used."""
    b_high = tl.load(p_x)
    b_low = b_high
    if OPERAND != tl.float32:
        b_low = tl.load(p_x + CHUNK * CHUNK)
    return b_high, b_low


@triton.jit
def join(b_high, b_low, OPERAND: tl.constexpr):
    """The float32 matrix whose parts are given."""
    b_x = b_high.to(tl.float32)
    return b_x + b_low.to(tl.float32) if OPERAND != tl.float32 else b_x


@triton.jit
def add_split(
    b_z, b_high_x, b_low_x, b_high_y, b_low_y, OPERAND: tl.constexpr, PRECISION: tl.constexpr
):
    """z + x y, where x and y are split into high and low parts.

    For sums over tokens: where keys are alike their terms cancel, and 16 bits would be lost.
    """
    b_z = tl.dot(b_high_x, b_high_y, b_z, input_precision=PRECISION)
    if OPERAND != tl.float32:
        b_z = tl.dot(b_low_x, b_high_y, b_z)
        b_z = tl.dot(b_high_x, b_low_y, b_z)
    return b_z


@triton.jit
def add_split_left(b_z, b_high, b_low, b_y, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """z + x y, where only x is split."""
    b_z = tl.dot(b_high, b_y, b_z, input_precision=PRECISION)
    if OPERAND != tl.float32:
        b_z = tl.dot(b_low, b_y, b_z)
    return b_z


@triton.jit
def add_split_right(b_z, b_x, b_y, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """z + x y, where only y is split, here."""
    b_high, b_low = split(b_y, OPERAND)
    b_z = tl.dot(b_x, b_high, b_z, input_precision=PRECISION)
    if OPERAND != tl.float32:
        b_z = tl.dot(b_x, b_low, b_z)
    return b_z
