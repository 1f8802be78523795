"""The Triton kernels of merge_states: bound by memory, a program merges BLOCK_ROWS rows.

Tensors come as tuples with a pointer for each part, or as one pointer and a stride from part to
part: every pointer stands for `parts` of them.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from flashvar.ops.merge_states.problem import LOWEST

# They change from call to call: one kernel runs all of their values.
RUNTIME: Final = (
    *("rows", "seqlen", "heads", "parts", "skipped"),
    *("lses_part", "lses_batch", "lses_head", "lses_row"),
)
_LOG2_E: Final = tl.constexpr(1.4426950408889634)
_INFINITY: Final = tl.constexpr(float("inf"))
_LOWEST: Final = tl.constexpr(LOWEST[torch.float32])


@triton.jit
def _coordinates(rows, seqlen, heads, i_block, BLOCK_ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Batch, sequence and head of a block's rows, and which of them there are."""
    if WIDE:
        i_block = i_block.to(tl.int64)
    o_row = i_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_head = o_row % heads
    i_sequence = o_row // heads % seqlen
    i_batch = o_row // heads // seqlen
    return i_batch.to(tl.int64), i_sequence.to(tl.int64), i_head.to(tl.int64), o_row < rows


@triton.jit
def _exponentials(p_lse, m_row, b_base):
    """exp(lse - base) of a part's rows: 0 where it counts for nothing, and nowhere else.

    A square, since exp2 flushes denormal results to 0.
    """
    b_lse = tl.load(p_lse, mask=m_row, other=-_INFINITY)
    b_below = b_lse - b_base
    m_absent = (b_lse == -_INFINITY) | (b_below < _LOWEST)
    b_root = tl.exp2(b_below * (_LOG2_E / 2))
    return tl.where(m_absent, 0.0, b_root * b_root)


@triton.jit
def _total(p_lses, o_lse, lses_part, parts, m_row, BLOCK_ROWS: tl.constexpr):
    """The largest lse of each row, 0 where all are -inf, and the sum of the exponentials."""
    b_base = tl.full([BLOCK_ROWS], -_INFINITY, tl.float32)
    for i in tl.static_range(len(p_lses)):
        p_lse = p_lses[i] + o_lse
        for _ in range(parts):
            b_lse = tl.load(p_lse, mask=m_row, other=-_INFINITY)
            b_base = tl.maximum(b_base, b_lse, propagate_nan=tl.PropagateNan.ALL)
            p_lse += lses_part
    b_base = tl.where(b_base == -_INFINITY, 0.0, b_base)
    b_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    for i in tl.static_range(len(p_lses)):
        p_lse = p_lses[i] + o_lse
        for _ in range(parts):
            b_sum += _exponentials(p_lse, m_row, b_base)
            p_lse += lses_part
    return b_base, b_sum


@triton.jit(do_not_specialize=RUNTIME)
def fwd_kernel(
    p_out,  # [batch, seqlen, heads, HEAD_DIM]
    p_lse,  # [batch, heads, seqlen], contiguous
    p_outs,  # like out
    p_lses,  # [batch, heads, seqlen]
    out_batch,
    out_row,
    out_head,
    outs_part,
    outs_batch,
    outs_row,
    outs_head,
    lses_part,
    lses_batch,
    lses_head,
    lses_row,
    rows,
    seqlen,
    heads,
    parts,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,  # whether rows are counted in 64 bits
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Writes one block. The grid has one axis; blocks of the same rows are adjacent."""
    blocks: tl.constexpr = max((HEAD_DIM + BLOCK_DIM - 1) // BLOCK_DIM, 1)
    i_batch, i_sequence, i_head, m_row = _coordinates(
        rows, seqlen, heads, tl.program_id(0) // blocks, BLOCK_ROWS, WIDE
    )
    o_lse = i_batch * lses_batch + i_head * lses_head + i_sequence * lses_row
    o_outs = i_batch * outs_batch + i_sequence * outs_row + i_head * outs_head
    o_dim = tl.program_id(0) % blocks * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    m_out = m_row[:, None] & (o_dim < HEAD_DIM)[None, :]
    b_base, b_sum = _total(p_lses, o_lse, lses_part, parts, m_row, BLOCK_ROWS)
    b_out = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for i in tl.static_range(len(p_outs)):
        p_part_lse = p_lses[i] + o_lse
        p_part = p_outs[i] + o_outs[:, None] + o_dim[None, :]
        for _ in range(parts):
            b_weight = _exponentials(p_part_lse, m_row, b_base)[:, None]
            b_part = tl.load(p_part, mask=m_out, other=0.0).to(tl.float32)
            b_out += tl.where(b_weight == 0.0, 0.0, b_weight * b_part)
            p_part_lse += lses_part
            p_part += outs_part
    b_out *= tl.where(b_sum == 0.0, 0.0, 1.0 / b_sum)[:, None]
    o_out = i_batch * out_batch + i_sequence * out_row + i_head * out_head
    tl.store(p_out + o_out[:, None] + o_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
    b_lse = tl.where(b_base == _INFINITY, b_base, b_base + tl.log(b_sum))
    m_first = m_row & (tl.program_id(0) % blocks == 0)
    tl.store(p_lse + (i_batch * heads + i_head) * seqlen + i_sequence, b_lse, mask=m_first)


@triton.jit(do_not_specialize=RUNTIME)
def bwd_kernel(
    p_grad_out,  # [batch, seqlen, heads, HEAD_DIM]
    p_grad_lse,  # [batch, heads, seqlen], contiguous; None: zeros
    p_grad_outs,  # [all parts but the skipped, ...] like grad_out, written; None: not wanted
    p_grad_lses,  # [all parts, batch, heads, seqlen], contiguous, written; None: not wanted
    p_outs,
    p_lses,
    grad_batch,
    grad_row,
    grad_head,
    grads_part,
    grads_batch,
    grads_row,
    grads_head,
    outs_part,
    outs_batch,
    outs_row,
    outs_head,
    lses_part,
    lses_batch,
    lses_head,
    lses_row,
    rows,
    seqlen,
    heads,
    parts,
    skipped,  # bit i: part i, below 31, has no place in grad_outs
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One block of rows. With c = grad_out . out of each part and delta = sum(weight * c), the
    gradients are weight * grad_out and weight * (c - delta + grad_lse). Without those of lses no
    out is read."""
    i_batch, i_sequence, i_head, m_row = _coordinates(
        rows, seqlen, heads, tl.program_id(0), BLOCK_ROWS, WIDE
    )
    o_lse = i_batch * lses_batch + i_head * lses_head + i_sequence * lses_row
    o_outs = i_batch * outs_batch + i_sequence * outs_row + i_head * outs_head
    o_grad = i_batch * grad_batch + i_sequence * grad_row + i_head * grad_head
    o_grads = i_batch * grads_batch + i_sequence * grads_row + i_head * grads_head
    o_index = (i_batch * heads + i_head) * seqlen + i_sequence
    b_base, b_sum = _total(p_lses, o_lse, lses_part, parts, m_row, BLOCK_ROWS)
    b_scale = tl.where(b_sum == 0.0, 0.0, 1.0 / b_sum)
    b_delta = tl.zeros([BLOCK_ROWS], tl.float32)
    i_part = 0
    if p_grad_outs is not None:
        p_grads = p_grad_outs + o_grads
    if p_grad_lses is not None:
        p_product = p_grad_lses + o_index
    for i in tl.static_range(len(p_lses)):
        p_lse = p_lses[i] + o_lse
        p_part = p_outs[i] + o_outs
        for _ in range(parts):
            b_exp = _exponentials(p_lse, m_row, b_base)
            b_weight = tl.where(b_exp == 0.0, 0.0, b_exp * b_scale)
            b_product = tl.zeros([BLOCK_ROWS], tl.float32)
            is_wanted = (skipped >> tl.minimum(i_part, 31)) & 1 == 0
            for start in tl.static_range(0, HEAD_DIM, BLOCK_DIM):
                o_dim = start + tl.arange(0, BLOCK_DIM)[None, :]
                m_out = m_row[:, None] & (o_dim < HEAD_DIM)
                p_grad = p_grad_out + o_grad[:, None] + o_dim
                b_grad = tl.load(p_grad, mask=m_out, other=0.0).to(tl.float32)
                if p_grad_lses is not None:
                    b_part = tl.load(p_part[:, None] + o_dim, mask=m_out, other=0.0).to(tl.float32)
                    b_product += tl.sum(b_grad * b_part, 1)
                if p_grad_outs is not None:
                    b_grad = tl.where(b_exp[:, None] == 0.0, 0.0, b_weight[:, None] * b_grad)
                    b_grad = b_grad.to(p_grad_outs.dtype.element_ty)
                    tl.store(p_grads[:, None] + o_dim, b_grad, mask=m_out & is_wanted)
            if p_grad_lses is not None:
                b_product = tl.where(b_exp == 0.0, 0.0, b_product)
                b_delta += b_weight * b_product
                tl.store(p_product, b_product, mask=m_row)
                p_product += rows
            if p_grad_outs is not None:
                p_grads += tl.where(is_wanted, grads_part, 0)
            p_lse += lses_part
            p_part += outs_part
            i_part += 1
    if p_grad_lses is not None:
        if p_grad_lse is not None:
            b_delta -= tl.load(p_grad_lse + o_index, mask=m_row, other=0.0)
        tl.debug_barrier()  # the products are read by other threads than wrote them
        p_product = p_grad_lses + o_index
        for i in tl.static_range(len(p_lses)):
            p_lse = p_lses[i] + o_lse
            for _ in range(parts):
                b_exp = _exponentials(p_lse, m_row, b_base)
                b_product = tl.load(p_product, mask=m_row, other=0.0)
                b_grad = b_exp * b_scale * (b_product - b_delta)
                tl.store(p_product, tl.where(b_exp == 0.0, 0.0, b_grad), mask=m_row)
                p_lse += lses_part
                p_product += rows
