"""Which rows a Triton program works on, in dense and in packed sequences.

Where packed sequences begin is known to the device alone. Then the grid is made for any lengths:
sequence b is given tiles from offsets[b] / ROWS + b on, which are at least as many as it needs, so
no more than total / ROWS + batch tiles are launched whatever the longest sequence is. Offsets that
make no sense lead to empty sequences, never outside of a tensor.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803

# Triton's own language has no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offset(p_offsets, i_sequence, total):
    """Where a sequence begins, inside the tensor whatever is stored."""
    return tl.minimum(tl.maximum(tl.load(p_offsets + i_sequence), 0), total)


@triton.jit
def span(
    p_offsets,  # int32 [batch + 1]; None: dense
    p_used,  # int32 [batch], how many rows of each sequence count; None: all
    i_sequence,
    seqlen,  # of every dense sequence
    total,  # rows of all packed sequences
):
    """First row in the tensor, rows, and rows that count, of one sequence."""
    first = 0
    count = seqlen
    if p_offsets is not None:
        first = _offset(p_offsets, i_sequence, total)
        count = tl.maximum(_offset(p_offsets, i_sequence + 1, total), first) - first
    used = count
    if p_used is not None:
        used = tl.minimum(tl.maximum(tl.load(p_used + i_sequence), 0), count)
    return first, count, used


@triton.jit
def _pair(i_program, tiles, rows, spread):
    """The tile and the row of a program; of neighbours the row differs with `spread`."""
    near = tl.where(spread, rows, tiles)
    i_near = i_program % near
    i_far = i_program // near
    return tl.where(spread, i_far, i_near), tl.where(spread, i_near, i_far)


@triton.jit
def place(
    p_offsets,  # int32 [batch + 1]; None: dense
    batch,
    heads,
    seqlen,
    total,
    spread,
    ROWS: tl.constexpr,
):
    """Sequence, head, tile of the sequence (it may lie past its end) and tile of the tensor.

    Tiles of one head of one sequence follow each other: they share its keys in the L2 cache. With
    `spread` the same tile of all heads does: the longest are first, where programs are few.
    """
    i_program = tl.program_id(0)
    if p_offsets is None:
        tiles = tl.cdiv(seqlen, ROWS)
        i_tile, i_row = _pair(i_program, tiles, batch * heads, spread)
        i_sequence = i_row // heads
        i_head = i_row % heads
        return i_sequence, i_head, i_tile, i_tile
    else:
        tiles = total // ROWS + batch
        i_tile, i_head = _pair(i_program, tiles, heads, spread)
        wanted = i_tile + _offset(p_offsets, 0, total) // ROWS
        i_sequence = 0
        after = batch
        while after - i_sequence > 1:
            middle = (i_sequence + after) // 2
            reached = _offset(p_offsets, middle, total) // ROWS + middle <= wanted
            i_sequence = tl.where(reached, middle, i_sequence)
            after = tl.where(reached, after, middle)
        first_tile = _offset(p_offsets, i_sequence, total) // ROWS + i_sequence
        return i_sequence, i_head, wanted - first_tile, i_tile


@triton.jit
def outside(p_offsets, batch, total, o_rows):
    """Which rows of a packed tensor belong to no sequence."""
    begin = _offset(p_offsets, 0, total)
    end = _offset(p_offsets, batch, total)
    return ((o_rows < begin) | (o_rows >= end)) & (o_rows < total)
