"""Tile coordinates of a Triton program, in dense and in packed sequences.

The offsets of packed sequences are on the device, so the grid must fit any lengths. The tiles of
sequence b begin at offsets[b] / ROWS + b, which leaves enough tiles for every sequence. Thus
total / ROWS + batch tiles suffice, independent of the longest sequence. Invalid offsets lead to
empty sequences, never to accesses outside a tensor.
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
    """The first row of a sequence, clamped to the tensor."""
    return tl.minimum(tl.maximum(tl.load(p_offsets + i_sequence), 0), total)


@triton.jit
def span(
    p_offsets,  # int32 [batch + 1]; None: dense
    p_used,  # int32 [batch], how many rows of each sequence are used; None: all
    i_sequence,
    seqlen,  # of every dense sequence
    total,  # rows of all packed sequences
):
    """The first row of a sequence in the tensor, its rows, and its used rows."""
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
def _pair(i_program, tiles, rows, interleave_heads):
    """The tile and the row of a program; adjacent programs differ in the tile, or in the row."""
    near = tl.where(interleave_heads, rows, tiles)
    i_near = i_program % near
    i_far = i_program // near
    return tl.where(interleave_heads, i_far, i_near), tl.where(interleave_heads, i_near, i_far)


@triton.jit
def work_tile(
    p_offsets,  # int32 [batch + 1]; None: dense
    batch,
    heads,
    seqlen,
    total,
    interleave_heads,
    ROWS: tl.constexpr,
):
    """Sequence, head, tile in the sequence (which may be past its end) and tile in the tensor.

    Adjacent programs have tiles of the same head of a sequence, which share its keys in the L2
    cache. With `interleave_heads` adjacent programs have the same tile of different heads; under a
    causal mask the longest tiles then run first.
    """
    i_program = tl.program_id(0)
    if p_offsets is None:
        tiles = tl.cdiv(seqlen, ROWS)
        i_tile, i_row = _pair(i_program, tiles, batch * heads, interleave_heads)
        i_sequence = i_row // heads
        i_head = i_row % heads
        return i_sequence, i_head, i_tile, i_tile
    else:
        tiles = total // ROWS + batch
        i_tile, i_head = _pair(i_program, tiles, heads, interleave_heads)
        padded_tile = i_tile + _offset(p_offsets, 0, total) // ROWS
        i_sequence = 0
        after = batch
        while after - i_sequence > 1:
            middle = (i_sequence + after) // 2
            reached = _offset(p_offsets, middle, total) // ROWS + middle <= padded_tile
            i_sequence = tl.where(reached, middle, i_sequence)
            after = tl.where(reached, after, middle)
        first_tile = _offset(p_offsets, i_sequence, total) // ROWS + i_sequence
        return i_sequence, i_head, padded_tile - first_tile, i_tile


@triton.jit
def rows_outside(p_offsets, batch, total, o_rows):
    """The mask of rows of a packed tensor that belong to no sequence."""
    begin = _offset(p_offsets, 0, total)
    end = _offset(p_offsets, batch, total)
    return ((o_rows < begin) | (o_rows >= end)) & (o_rows < total)
