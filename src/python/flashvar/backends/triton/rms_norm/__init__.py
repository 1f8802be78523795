"""Launches of the Triton kernels of norms: fixed configurations, nothing is tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.repeated import RepeatedLaunch, on_device
from flashvar.backends.triton.rms_norm.kernels import bwd_kernel, fwd_kernel, sum_kernel
from flashvar.ops.plans import maker

if TYPE_CHECKING:
    from flashvar.ops.rms_norm.formula import Norm, Tensors
    from flashvar.ops.rms_norm.run import BackwardLaunch, ForwardLaunch

# Elements of a block for each thread: 32 bytes of 16-bit dtypes.
_ELEMENTS: Final = 16
_FORWARD_WARPS: Final = 4  # of a program, unless its rows are long
_BACKWARD_WARPS: Final = 2
_MAX_WARPS: Final = 16
# Warps of all programs of a backward: as many as run at once on the largest devices. Independent of
# the device, so that sums have the same order on all.
_ALL_BACKWARD_WARPS: Final = 4096
# A backward loads its next block into shared memory while it computes one, unless the two need more
# than every device has.
_SHARED_BYTES: Final = 48 * 1024
# Of the sums over the programs of a backward: four loads of 16 bytes for each thread, in segments
# of 64 bytes, so that there are several programs for few columns too.
_SUM_CONSTANTS: Final = {
    "BLOCK_PARTS": 256,
    "BLOCK_DIM": 16,
    "num_warps": 8,
    "enable_fp_fusion": True,
}


def prepare_forward(tensors: Tensors, norm: Norm) -> ForwardLaunch:
    """What writes the result, and the sum of x and the residual unless it is None."""
    x = tensors.x
    dim, device = x.shape[-1], x.device.index
    rows = x.numel() // dim
    copied, (x_row, gate_row, _, _, residual_row) = _rows(tensors, dim)
    arguments = {
        "x_row": x_row,
        "gate_row": gate_row,
        "residual_row": residual_row,
        "rows": rows,
        **_constants(dim, norm, _FORWARD_WARPS),
    }
    run = RepeatedLaunch(fwd_kernel, (-(-rows // arguments["BLOCK_ROWS"]),), arguments)

    def launch(
        y: torch.Tensor, total: torch.Tensor | None, tensors: Sequence[torch.Tensor | None]
    ) -> None:
        with on_device(device):
            run(y, total, *_by_rows(tensors, copied))

    return launch


def prepare_backward(given: Sequence[Any], norm: Norm) -> BackwardLaunch:
    """What writes the gradients that are not None; `given` are those of the results, and tensors.

    That of a residual of another dtype than x is one of its own.
    """
    x = given[2]
    dim, device = x.shape[-1], x.device.index
    rows = x.numel() // dim
    copied, strides = _rows(given, dim)
    grad_y_row, grad_total_row, x_row, gate_row, _, _, residual_row = strides
    arguments = {
        "grad_y_row": grad_y_row,
        "grad_total_row": grad_total_row,
        "x_row": x_row,
        "gate_row": gate_row,
        "residual_row": residual_row,
        "rows": rows,
        **_constants(dim, norm, _BACKWARD_WARPS),
    }
    block_rows = arguments["BLOCK_ROWS"]
    block_bytes = sum(
        block_rows * arguments["BLOCK_DIM"] * tensor.element_size()
        for tensor in given
        if tensor is not None and tensor.numel() == x.numel()
    )
    arguments["STAGES"] = 2 if 2 * block_bytes <= _SHARED_BYTES else 1
    programs = min(-(-rows // block_rows), _ALL_BACKWARD_WARPS // arguments["num_warps"])
    run = RepeatedLaunch(bwd_kernel, (programs,), arguments)
    make_parts = maker(x.new_empty(programs, dim, dtype=torch.float32))
    of_sums = {"parts": programs, "DIM": dim, **_SUM_CONSTANTS}
    run_sums = RepeatedLaunch(sum_kernel, (-(-dim // of_sums["BLOCK_DIM"]),), of_sums)

    def launch(grads: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
        of_x, of_gate, of_weight, of_bias, of_residual = grads
        of_columns = of_weight, of_bias
        parts = [None if grad is None else make_parts() for grad in of_columns]
        with on_device(device):
            run(of_x, of_gate, of_residual, *parts, *_by_rows(given, copied))
            if of_weight is not None or of_bias is not None:
                run_sums(*of_columns, *parts)

    return launch


def _rows(
    tensors: Sequence[torch.Tensor | None], dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of tensors of which the kernels get copies, and the strides of rows."""
    found = [_row_stride(x, dim) for x in tensors]
    copied = tuple(index for index, stride in enumerate(found) if stride is None)
    return copied, tuple(dim if stride is None else stride for stride in found)


def _row_stride(x: torch.Tensor | None, dim: int) -> int | None:
    """Where rows are at multiples of a stride, that; None where the kernels cannot read them."""
    if x is None:
        return 0
    if x.is_contiguous():
        return dim
    try:
        rows = x.view(-1, dim)
    except RuntimeError:  # no view has these rows
        return None
    stride: int = rows.stride(0)
    return stride if rows.stride(1) == 1 else None


def _by_rows(
    tensors: Sequence[torch.Tensor | None], copied: tuple[int, ...]
) -> Sequence[torch.Tensor | None]:
    """The tensors that the kernels get."""
    if not copied:
        return tensors
    return [
        x.contiguous() if x is not None and index in copied else x
        for index, x in enumerate(tensors)
    ]


def _block(dim: int, least_warps: int) -> tuple[int, int, int]:
    """Rows and columns of a block, and warps of a program."""
    block_dim = power_of_2(dim)
    warps = min(max(block_dim // (32 * _ELEMENTS), least_warps), _MAX_WARPS)
    return max(warps * 32 * _ELEMENTS // block_dim, 1), block_dim, warps


def _constants(dim: int, norm: Norm, least_warps: int) -> dict[str, Any]:
    block_rows, block_dim, warps = _block(dim, least_warps)
    return {
        "eps": norm.eps,
        "DIM": dim,
        "MEAN": norm.mean,
        "SIGMOID": norm.sigmoid,
        "BLOCK_ROWS": block_rows,
        "BLOCK_DIM": block_dim,
        "num_warps": warps,
        "enable_fp_fusion": True,
    }
