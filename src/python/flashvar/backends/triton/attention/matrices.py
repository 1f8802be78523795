"""Loads, stores and products of blocks of rows whose head dim is in two parts.

A head dim that is not a power of two is split into two powers of two, HEAD and TAIL (96 = 64 + 32),
to keep padding small. Where one power of two suffices, TAIL is 0; the second part of every pair is
then an unused alias of the first.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803

# Triton's own language has no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_part(
    p_first,
    o_rows,  # [rows]
    o_dims,  # [dims]
    stride,
    rows,
    DIM: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_DIMS: tl.constexpr,
):
    p_block = p_first + (o_rows[:, None] * stride + o_dims[None, :])
    if MASK_ROWS and MASK_DIMS:
        return tl.load(p_block, mask=(o_rows[:, None] < rows) & (o_dims[None, :] < DIM), other=0.0)
    elif MASK_ROWS:
        return tl.load(p_block, mask=o_rows[:, None] < rows, other=0.0)
    elif MASK_DIMS:
        return tl.load(p_block, mask=o_dims[None, :] < DIM, other=0.0)
    else:
        return tl.load(p_block)


@triton.jit
def load_rows(
    p_first,  # row 0, dim 0 of the block
    stride,  # between rows, int64
    rows,  # how many rows of the block exist
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """Load [ROWS, HEAD] and [ROWS, TAIL]; elements outside the matrix are 0 and are not read."""
    o_rows = tl.arange(0, ROWS)
    o_head = tl.arange(0, HEAD)
    b_head = _load_part(p_first, o_rows, o_head, stride, rows, DIM, MASK_ROWS, HEAD > DIM)
    b_tail = b_head
    if TAIL > 0:
        o_tail = HEAD + tl.arange(0, TAIL)
        b_tail = _load_part(
            p_first, o_rows, o_tail, stride, rows, DIM, MASK_ROWS, HEAD + TAIL > DIM
        )
    return b_head, b_tail


@triton.jit
def store_rows(
    p_first,
    stride,
    m_rows,  # [ROWS]: rows to write
    b_head,  # [ROWS, HEAD]
    b_tail,  # [ROWS, TAIL]
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write both parts, rounded to the tensor's dtype."""
    o_rows = tl.arange(0, ROWS)
    o_head = tl.arange(0, HEAD)
    p_rows = p_first + o_rows[:, None] * stride
    dtype = p_first.dtype.element_ty
    tl.store(
        p_rows + o_head[None, :], b_head.to(dtype), mask=m_rows[:, None] & (o_head[None, :] < DIM)
    )
    if TAIL > 0:
        o_tail = HEAD + tl.arange(0, TAIL)
        tl.store(
            p_rows + o_tail[None, :],
            b_tail.to(dtype),
            mask=m_rows[:, None] & (o_tail[None, :] < DIM),
        )


@triton.jit
def clear_rows(
    p_first,
    stride,
    m_rows,  # [ROWS]
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write zeros to some rows."""
    b_head = tl.zeros([ROWS, HEAD], tl.float32)
    b_tail = b_head
    if TAIL > 0:
        b_tail = tl.zeros([ROWS, TAIL], tl.float32)
    store_rows(p_first, stride, m_rows, b_head, b_tail, ROWS, DIM, HEAD, TAIL)


@triton.jit
def zeros(ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """A zero accumulator, [ROWS, HEAD] and [ROWS, TAIL] float32."""
    b_head = tl.zeros([ROWS, HEAD], tl.float32)
    b_tail = b_head
    if TAIL > 0:
        b_tail = tl.zeros([ROWS, TAIL], tl.float32)
    return b_head, b_tail


@triton.jit
def times_transposed(b_left, b_left_tail, b_right, b_right_tail, TAIL: tl.constexpr):
    """left right^T over the whole head dim: [rows of left, rows of right] float32."""
    b_product = tl.dot(b_left, tl.trans(b_right))
    if TAIL > 0:
        b_product = tl.dot(b_left_tail, tl.trans(b_right_tail), b_product)
    return b_product
