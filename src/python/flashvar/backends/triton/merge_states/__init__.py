"""Launches of the Triton kernels of merge_states: one fixed configuration, nothing is tuned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from flashvar.backends.triton.begin import Begin, start
from flashvar.backends.triton.merge_states.kernels import bwd_kernel, fwd_kernel

if TYPE_CHECKING:
    from flashvar.ops.merge_states.problem import Parts
    from flashvar.selection.candidates import CandidateResult

# Each number of pointers is a kernel of its own; more parts than this are stacked.
_MOST_POINTERS: Final = 8
# Elements of a block: 16 bytes of a 16-bit dtype for each thread of 4 warps.
_ELEMENTS: Final = 128 * 8
_MOST_COLUMNS: Final = 256
_INT32_MAX: Final = 2**31 - 1
_WARPS: Final = 4


def forward(
    chosen: CandidateResult | None,
    parts: Parts,
    out: torch.Tensor,
    lse: torch.Tensor,
    begin: Begin = start,
) -> None:
    """Write the merged out and its log-sum-exp, which is contiguous."""
    sizes = _sizes(out)
    outs, lses, strides = _pointers(parts, out)
    blocks = max(-(-out.shape[-1] // sizes["BLOCK_DIM"]), 1)
    grid = (-(-lse.numel() // sizes["BLOCK_ROWS"]) * blocks,)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        begin(fwd_kernel, grid)(out, lse, outs, lses, *out.stride()[:3], *strides, **sizes)


def backward(
    chosen: CandidateResult | None,
    parts: Parts,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grad_outs: torch.Tensor,
    grad_lses: torch.Tensor,
    begin: Begin = start,
) -> None:
    """Write the gradients: stacked, those of lses contiguous as `grad_lse` is."""
    sizes = _sizes(grad_out)
    outs, lses, strides = _pointers(parts, grad_out)
    grid = (-(-grad_lses[0].numel() // sizes["BLOCK_ROWS"]),)
    tensors = (grad_out, grad_lse, grad_outs, grad_lses, outs, lses)
    with torch.cuda.device_of(grad_out):
        begin(bwd_kernel, grid)(
            *tensors, *grad_out.stride()[:3], *grad_outs.stride()[:4], *strides, **sizes
        )


def _pointers(
    parts: Parts, out: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The tensors that kernels get; the strides of both; rows of out and parts of a pointer."""
    if len(parts.outs) > _MOST_POINTERS:
        parts = parts.as_stacked()
    outs, lses = parts.outs, parts.lses
    batch, seqlen, heads = out.shape[:3]
    rows = batch * seqlen * heads, seqlen, heads
    if parts.stacked:
        return outs, lses, (*outs[0].stride()[:4], *lses[0].stride(), *rows, outs[0].shape[0])
    return outs, lses, (0, *outs[0].stride()[:3], 0, *lses[0].stride(), *rows, 1)


def _sizes(out: torch.Tensor) -> dict[str, Any]:
    """The kernels' constants and options."""
    head_dim = out.shape[-1]
    columns = min(max(triton.next_power_of_2(head_dim), 16), _MOST_COLUMNS)
    return {
        "HEAD_DIM": head_dim,
        "WIDE": out.shape[:3].numel() > _INT32_MAX - _ELEMENTS,
        "BLOCK_ROWS": max(_ELEMENTS // columns, 1),
        "BLOCK_DIM": columns,
        "num_warps": _WARPS,
    }
