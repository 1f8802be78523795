"""The Triton kernels of norms: bound by memory, a block has whole rows.

A backward sums the squares anew: it holds the row anyway, and this sum and that of the gradient do
not wait for one another. So no statistics are stored.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _loaded(p_x, x_row, o_row, o_dim, mask):
    """A block of rows, in float32."""
    return tl.load(p_x + o_row * x_row + o_dim, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _block(
    p_x,
    p_residual,
    x_row,
    residual_row,
    i_block,
    rows,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The rows and columns of a block, which elements there are, and the sum that is normalised."""
    o_row = (i_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    o_dim = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (o_row < rows) & (o_dim < DIM)
    b_total = _loaded(p_x, x_row, o_row, o_dim, mask)
    if p_residual is not None:
        b_total += _loaded(p_residual, residual_row, o_row, o_dim, mask)
    return o_row, o_dim, mask, b_total


@triton.jit
def _reduced(b_x, DIM: tl.constexpr, MEAN: tl.constexpr):
    """The mean or the sum of each row."""
    b_sum = tl.sum(b_x, 1)[:, None]
    if MEAN:
        b_sum = b_sum / DIM
    return b_sum


@triton.jit
def _normal(b_total, eps, DIM: tl.constexpr, MEAN: tl.constexpr):
    """The factor of each row, and the rows times their factors."""
    b_factor = tl.rsqrt(_reduced(b_total * b_total, DIM, MEAN) + eps)
    return b_factor, b_total * b_factor


@triton.jit
def _affine(b_normal, p_weight, p_bias, o_dim, DIM: tl.constexpr):
    if p_weight is not None:
        b_normal *= tl.load(p_weight + o_dim, mask=o_dim < DIM, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_normal += tl.load(p_bias + o_dim, mask=o_dim < DIM, other=0.0).to(tl.float32)
    return b_normal


@triton.jit(do_not_specialize=["rows"])
def fwd_kernel(
    p_y,  # [rows, DIM], contiguous
    p_total,  # [rows, DIM], contiguous: the sum; None: not wanted
    p_x,  # [rows, DIM], as are gate and residual
    p_gate,  # may be None, as what follows
    p_weight,  # [DIM]
    p_bias,
    p_residual,
    x_row,
    gate_row,
    residual_row,
    rows,
    eps,
    DIM: tl.constexpr,
    MEAN: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One block."""
    i_block = tl.program_id(0).to(tl.int64)
    o_row, o_dim, mask, b_total = _block(
        p_x, p_residual, x_row, residual_row, i_block, rows, DIM, BLOCK_ROWS, BLOCK_DIM
    )
    if p_gate is not None:
        # Before the sums of rows, for which a load behind them would wait.
        b_gate = _loaded(p_gate, gate_row, o_row, o_dim, mask)
    _, b_normal = _normal(b_total, eps, DIM, MEAN)
    b_y = _affine(b_normal, p_weight, p_bias, o_dim, DIM)
    if p_gate is not None:
        b_y *= tl.sigmoid(b_gate)
        if not SIGMOID:
            b_y *= b_gate
    o_out = o_row * DIM + o_dim
    tl.store(p_y + o_out, b_y.to(p_y.dtype.element_ty), mask=mask)
    if p_total is not None:
        tl.store(p_total + o_out, b_total.to(p_total.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def bwd_kernel(
    p_grad_x,  # [rows, DIM], contiguous, as are the gradients of gate and residual
    p_grad_gate,  # None: not wanted, as what follows
    p_grad_residual,
    p_parts_weight,  # [programs, DIM], float32, to be summed
    p_parts_bias,
    p_grad_y,  # [rows, DIM], as is the gradient of the sum
    p_grad_total,  # may be None
    p_x,
    p_gate,
    p_weight,
    p_bias,
    p_residual,
    grad_y_row,
    grad_total_row,
    x_row,
    gate_row,
    residual_row,
    rows,
    eps,
    DIM: tl.constexpr,
    MEAN: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every block whose number is that of the program, modulo the number of programs."""
    b_parts_weight = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    b_parts_bias = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    for i_block in tl.range(first, blocks, tl.num_programs(0), num_stages=STAGES):
        o_row, o_dim, mask, b_total = _block(
            p_x, p_residual, x_row, residual_row, i_block, rows, DIM, BLOCK_ROWS, BLOCK_DIM
        )
        o_out = o_row * DIM + o_dim
        # Before the sums of rows, for which a load behind them would wait.
        b_grad = _loaded(p_grad_y, grad_y_row, o_row, o_dim, mask)
        if p_gate is not None:
            b_gate = _loaded(p_gate, gate_row, o_row, o_dim, mask)
        b_factor, b_normal = _normal(b_total, eps, DIM, MEAN)
        if p_gate is not None:
            b_sigmoid = tl.sigmoid(b_gate)
            if p_grad_gate is not None:
                b_slope = b_sigmoid * (1.0 - b_sigmoid)
                if not SIGMOID:
                    b_slope = b_sigmoid + b_gate * b_slope
                b_slope *= b_grad * _affine(b_normal, p_weight, p_bias, o_dim, DIM)
                b_slope = b_slope.to(p_grad_gate.dtype.element_ty)
                tl.store(p_grad_gate + o_out, b_slope, mask=mask)
            b_grad *= b_sigmoid
            if not SIGMOID:
                b_grad *= b_gate
        if p_parts_weight is not None:
            b_parts_weight += b_grad * b_normal
        if p_parts_bias is not None:
            b_parts_bias += b_grad
        b_grad = _affine(b_grad, p_weight, None, o_dim, DIM)
        b_grad = b_factor * (b_grad - b_normal * _reduced(b_grad * b_normal, DIM, MEAN))
        if p_grad_total is not None:
            b_grad += _loaded(p_grad_total, grad_total_row, o_row, o_dim, mask)
        tl.store(p_grad_x + o_out, b_grad.to(p_grad_x.dtype.element_ty), mask=mask)
        if p_grad_residual is not None:
            b_residual = b_grad.to(p_grad_residual.dtype.element_ty)
            tl.store(p_grad_residual + o_out, b_residual, mask=mask)
    o_dim = tl.arange(0, BLOCK_DIM)
    o_part = tl.program_id(0) * DIM + o_dim
    if p_parts_weight is not None:
        tl.store(p_parts_weight + o_part, tl.sum(b_parts_weight, 0), mask=o_dim < DIM)
    if p_parts_bias is not None:
        tl.store(p_parts_bias + o_part, tl.sum(b_parts_bias, 0), mask=o_dim < DIM)


@triton.jit(do_not_specialize=["parts"])
def sum_kernel(
    p_grad_weight,  # [DIM]; None as its parts are
    p_grad_bias,
    p_parts_weight,  # [parts, DIM]
    p_parts_bias,
    parts,
    DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The gradients of weight and bias in some columns."""
    if p_parts_weight is not None:
        _sum_parts(p_grad_weight, p_parts_weight, parts, DIM, BLOCK_PARTS, BLOCK_DIM)
    if p_parts_bias is not None:
        _sum_parts(p_grad_bias, p_parts_bias, parts, DIM, BLOCK_PARTS, BLOCK_DIM)


@triton.jit
def _sum_parts(
    p_grad, p_parts, parts, DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    o_dim = tl.program_id(0) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    b_sums = tl.zeros([BLOCK_PARTS, BLOCK_DIM], tl.float32)
    for first in range(0, parts, BLOCK_PARTS):
        o_part = (first + tl.arange(0, BLOCK_PARTS))[:, None]
        mask = (o_part < parts) & (o_dim < DIM)[None, :]
        b_sums += tl.load(p_parts + o_part * DIM + o_dim[None, :], mask=mask, other=0.0)
    b_grad = tl.sum(b_sums, 0).to(p_grad.dtype.element_ty)
    tl.store(p_grad + o_dim, b_grad, mask=o_dim < DIM)
