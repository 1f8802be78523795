"""Launches of the Triton kernels of norms: fixed configurations, nothing is tuned."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
import triton

from flashvar.backends.triton.repeated import RepeatedLaunch
from flashvar.backends.triton.rms_norm.kernels import bwd_kernel, fwd_kernel
from flashvar.ops.rms_norm.formula import Gradients, Norm, Tensors

# Elements of a block for each thread: of 16-bit dtypes 32 bytes, in a backward 16.
_ELEMENTS: Final = 16
_BACKWARD_ELEMENTS: Final = 8
_WARPS: Final = 4
_MOST_WARPS: Final = 16
# Warps of all programs of a backward: as many as run at once on the largest devices. Independent of
# the device, so that sums have the same order on all.
_BACKWARD_WARPS: Final = 4096
# Launches kept: of several norms in every length of a prompt.
_KEPT: Final = 1024


def forward(tensors: Tensors, norm: Norm) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and the sum of x and the residual if it is wanted."""
    x = tensors.x
    shape, device, dim = x.shape, x.device, x.shape[-1]
    y = torch.empty(shape, dtype=norm.dtype, device=device)
    total = None
    if norm.total_dtype is not None:
        total = torch.empty(shape, dtype=norm.total_dtype, device=device)
    rows = x.numel() // dim
    if rows:
        tensors, *strides = _by_rows(tensors, dim)
        launch = _forward(device, rows, dim, norm[:3], *strides)
        with torch.cuda.device_of(y):  # Triton launches on the current device
            launch(y, total, *tensors)
    return y, total


def backward(
    grad_y: torch.Tensor,
    grad_total: torch.Tensor | None,
    tensors: Tensors,
    norm: Norm,
) -> Gradients:
    """The gradients; that of a residual which has the dtype of x is that of x."""
    x, gate, weight, bias, residual = tensors
    shape, device, dim = x.shape, x.device, x.shape[-1]
    rows = x.numel() // dim
    block_rows, _, warps = _block(dim, _BACKWARD_ELEMENTS)
    programs = min(-(-rows // block_rows), _BACKWARD_WARPS // warps)
    of_x = torch.empty(shape, dtype=x.dtype, device=device)
    of_gate = None if gate is None else torch.empty(shape, dtype=gate.dtype, device=device)
    of_residual = None
    if residual is not None and residual.dtype != x.dtype:
        of_residual = torch.empty(shape, dtype=residual.dtype, device=device)
    parts = [
        None if one is None else torch.empty(programs, dim, dtype=torch.float32, device=device)
        for one in (weight, bias)
    ]
    if rows:
        grad_y, grad_y_row = _rows(grad_y, dim)
        grad_total_row = 0
        if grad_total is not None:
            grad_total, grad_total_row = _rows(grad_total, dim)
        tensors, *strides = _by_rows(tensors, dim)
        launch = _backward(
            *(device, rows, dim, programs, norm[:3], grad_y_row, grad_total_row), *strides
        )
        with torch.cuda.device_of(of_x):
            launch(of_x, of_gate, of_residual, *parts, grad_y, grad_total, *tensors)
    of_weight, of_bias = (
        None if one is None or part is None else part.sum(0).to(one.dtype)
        for one, part in zip((weight, bias), parts, strict=True)
    )
    if residual is not None and of_residual is None:
        of_residual = of_x
    return Gradients(of_x, of_gate, of_weight, of_bias, of_residual)


def _rows(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, int]:
    """A tensor whose rows are at multiples of a stride; a copy where there is none."""
    if x.is_contiguous():
        return x, dim
    rows = x.reshape(-1, dim)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def _by_rows(tensors: Tensors, dim: int) -> tuple[Tensors, int, int, int]:
    """The tensors, and the strides of rows of x, gate and residual."""
    x, gate, weight, bias, residual = tensors
    gate_row = residual_row = 0
    x, x_row = _rows(x, dim)
    if gate is not None:
        gate, gate_row = _rows(gate, dim)
    if residual is not None:
        residual, residual_row = _rows(residual, dim)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    return Tensors(x, gate, weight, bias, residual), x_row, gate_row, residual_row


def _block(dim: int, elements: int) -> tuple[int, int, int]:
    """Rows and columns of a block, and warps of a program."""
    block_dim = triton.next_power_of_2(dim)
    warps = min(max(block_dim // (32 * elements), _WARPS), _MOST_WARPS)
    return max(warps * 32 * elements // block_dim, 1), block_dim, warps


def _constants(dim: int, options: tuple[float, bool, bool], elements: int) -> dict[str, Any]:
    block_rows, block_dim, warps = _block(dim, elements)
    eps, mean, sigmoid = options
    return {
        "eps": eps,
        "DIM": dim,
        "MEAN": mean,
        "SIGMOID": sigmoid,
        "BLOCK_ROWS": block_rows,
        "BLOCK_DIM": block_dim,
        "num_warps": warps,
        "enable_fp_fusion": True,
    }


@lru_cache(maxsize=_KEPT)
def _forward(
    device: torch.device,
    rows: int,
    dim: int,
    options: tuple[float, bool, bool],
    x_row: int,
    gate_row: int,
    residual_row: int,
) -> RepeatedLaunch:
    constants = _constants(dim, options, _ELEMENTS)
    strides = {"x_row": x_row, "gate_row": gate_row, "residual_row": residual_row}
    grid = (-(-rows // constants["BLOCK_ROWS"]),)
    return RepeatedLaunch(fwd_kernel, grid, {**strides, "rows": rows, **constants})


@lru_cache(maxsize=_KEPT)
def _backward(
    device: torch.device,
    rows: int,
    dim: int,
    programs: int,
    options: tuple[float, bool, bool],
    grad_y_row: int,
    grad_total_row: int,
    x_row: int,
    gate_row: int,
    residual_row: int,
) -> RepeatedLaunch:
    strides = {
        "grad_y_row": grad_y_row,
        "grad_total_row": grad_total_row,
        "x_row": x_row,
        "gate_row": gate_row,
        "residual_row": residual_row,
    }
    constants = _constants(dim, options, _BACKWARD_ELEMENTS)
    return RepeatedLaunch(bwd_kernel, (programs,), {**strides, "rows": rows, **constants})
