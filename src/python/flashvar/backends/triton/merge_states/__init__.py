"""Launches of the Triton kernels of merge_states: one fixed configuration, nothing is tuned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.launch_or_compile import Begin, start
from flashvar.backends.triton.merge_states.kernels import bwd_kernel, fwd_kernel
from flashvar.backends.triton.repeated import on_device

if TYPE_CHECKING:
    from flashvar.ops.merge_states.problem import BackwardLaunch, ForwardLaunch, Parts
    from flashvar.selection.candidates import CandidateResult

# Each number of pointers is a kernel of its own. More parts than this are copied into one tensor.
_MAX_POINTERS: Final = 8
# Elements of a block: 16 bytes of a 16-bit dtype for each thread of 4 warps.
_ELEMENTS: Final = 128 * 8
_MAX_BLOCK_DIM: Final = 256
_INT32_MAX: Final = 2**31 - 1
_WARPS: Final = 4


def prepare_forward(
    chosen: CandidateResult | None,
    parts: Parts,
    out: torch.Tensor,
    lse: torch.Tensor,
    begin: Begin = start,
) -> ForwardLaunch:
    """The launch that writes the merged out and its log-sum-exp, which is contiguous."""
    sizes, of_out, strides = _sizes(out), out.stride()[:3], _strides(parts, out)
    blocks = max(-(-out.shape[-1] // sizes["BLOCK_DIM"]), 1)
    grid = (-(-lse.numel() // sizes["BLOCK_ROWS"]) * blocks,)

    def launch(parts: Parts, out: torch.Tensor, lse: torch.Tensor) -> None:
        parts = _pointers(parts)
        with on_device(out.device.index):  # Triton launches on the current device
            begin(fwd_kernel, grid)(out, lse, parts.outs, parts.lses, *of_out, *strides, **sizes)

    return launch


def prepare_backward(
    chosen: CandidateResult | None,
    parts: Parts,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grad_outs: torch.Tensor | None,
    grad_lses: torch.Tensor | None,
    skipped: int,
    begin: Begin = start,
) -> BackwardLaunch:
    """The launch that writes the wanted gradients; those of lses are contiguous as grad_lse is."""
    sizes, strides = _sizes(grad_out), _strides(parts, grad_out)
    of_grads = (0,) * 4 if grad_outs is None else grad_outs.stride()[:4]
    numbers = (*grad_out.stride()[:3], *of_grads, *strides, skipped)
    grid = (-(-grad_out.shape[:3].numel() // sizes["BLOCK_ROWS"]),)

    def launch(
        parts: Parts,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grad_outs: torch.Tensor | None,
        grad_lses: torch.Tensor | None,
    ) -> None:
        parts = _pointers(parts)
        tensors = (grad_out, grad_lse, grad_outs, grad_lses, parts.outs, parts.lses)
        with on_device(grad_out.device.index):
            begin(bwd_kernel, grid)(*tensors, *numbers, **sizes)

    return launch


def _pointers(parts: Parts) -> Parts:
    """The tensors that kernels get."""
    return parts.as_stacked() if len(parts.outs) > _MAX_POINTERS else parts


def _strides(parts: Parts, out: torch.Tensor) -> tuple[int, ...]:
    """The strides of outs and lses, the numbers of rows, and the parts of each pointer."""
    parts = _pointers(parts)
    outs, lses = parts.outs, parts.lses
    batch, seqlen, heads = out.shape[:3]
    rows = batch * seqlen * heads, seqlen, heads
    if parts.stacked:
        return (*outs[0].stride()[:4], *lses[0].stride(), *rows, outs[0].shape[0])
    return (0, *outs[0].stride()[:3], 0, *lses[0].stride(), *rows, 1)


def _sizes(out: torch.Tensor) -> dict[str, Any]:
    """The kernels' constants and options."""
    head_dim = out.shape[-1]
    columns = min(max(power_of_2(head_dim), 16), _MAX_BLOCK_DIM)
    return {
        "HEAD_DIM": head_dim,
        "WIDE": out.shape[:3].numel() > _INT32_MAX - _ELEMENTS,
        "BLOCK_ROWS": max(_ELEMENTS // columns, 1),
        "BLOCK_DIM": columns,
        "num_warps": _WARPS,
        "enable_fp_fusion": True,
    }
