"""merge_states through a compiled binary: the C structs of `merge_states.h`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar.backends.cuda.call import CALL, DTYPES, TENSOR, call_head, function_of
from flashvar.ops.dtypes import DTYPES as NAMES
from flashvar.ops.merge_states.spec import BACKWARD, FORWARD

if TYPE_CHECKING:
    from flashvar.ops.merge_states.problem import Parts
    from flashvar.selection.candidates import CandidateResult

# flashvar_merge_states_problem: batch seqlen heads head_dim dtype parts; outs, from part to part,
# their addresses; the same of lses.
_PROBLEM: Final = struct.Struct(f"<qqiiIi{TENSOR}qQ{TENSOR}qQ")
# flashvar_merge_states_fwd_params: out and lse.
_FORWARD: Final = struct.Struct(f"<{CALL}{TENSOR}Q{_PROBLEM.size}s")
# flashvar_merge_states_bwd_params: grad_out, grad_lse, grad_outs, from part to part, grad_lses; the
# problem; bits of the skipped outs.
_BACKWARD: Final = struct.Struct(f"<{CALL}{TENSOR}Q{TENSOR}qQ{_PROBLEM.size}sQ")
# FLASHVAR_MERGE_STATES_MAX_ADDRESSES
_MAX_ADDRESSES: Final = 224
# A flashvar_tensor that is not wanted, and its stride from part to part.
_NO_TENSOR: Final = (0, 0, 0, 0, 0)
# The kernels want no workspace.
_WORKSPACE: Final = (0, 0)


def forward(chosen: CandidateResult, parts: Parts, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the merged out and its log-sum-exp."""
    function, device = function_of(FORWARD, chosen, out.device.index)
    packed, _kept = _forward(device, parts, out, lse)
    function.launch(packed)


def explain_forward(
    chosen: CandidateResult, parts: Parts, out: torch.Tensor, lse: torch.Tensor
) -> str:
    """How the binary reads the rows of a call, and why."""
    function, device = function_of(FORWARD, chosen, out.device.index)
    packed, _kept = _forward(device, parts, out, lse)
    return function.explain(packed)


def _forward(
    device: int, parts: Parts, out: torch.Tensor, lse: torch.Tensor
) -> tuple[bytes, object]:
    """The struct of a call, and what has to live until the call is made."""
    problem, kept = _problem(parts, out)
    packed = _FORWARD.pack(
        call_head(_FORWARD, device),
        torch._C._cuda_getCurrentRawStream(device),
        *_WORKSPACE,
        *_rows(out),
        lse.data_ptr(),
        problem,
    )
    return packed, kept


def backward(
    chosen: CandidateResult,
    parts: Parts,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grad_outs: torch.Tensor | None,
    grad_lses: torch.Tensor | None,
    skipped: int,
) -> None:
    """Write the gradients that are wanted, stacked."""
    function, device = function_of(BACKWARD, chosen, grad_out.device.index)
    problem, _kept = _problem(parts, grad_out)
    function.launch(
        _BACKWARD.pack(
            call_head(_BACKWARD, device),
            torch._C._cuda_getCurrentRawStream(device),
            *_WORKSPACE,
            *_rows(grad_out),
            0 if grad_lse is None else grad_lse.data_ptr(),
            *(_NO_TENSOR if grad_outs is None else (*_rows(grad_outs[0]), grad_outs.stride(0))),
            0 if grad_lses is None else grad_lses.data_ptr(),
            problem,
            skipped,
        )
    )


def _problem(parts: Parts, out: torch.Tensor) -> tuple[bytes, object]:
    """The problem's struct, and what has to live until the call is made."""
    if len(parts.outs) > _MAX_ADDRESSES:
        parts = parts.as_stacked()
    outs, outs_kept = _parts(parts.outs, parts.stacked, _rows)
    lses, lses_kept = _parts(parts.lses, parts.stacked, _log_sum_exps)
    sizes = (*out.shape, DTYPES[NAMES[out.dtype]], parts.count)
    return _PROBLEM.pack(*sizes, *outs, *lses), (parts, outs_kept, lses_kept)


def _parts(tensors: Sequence[torch.Tensor], stacked: bool, tensor_of: Any) -> Any:
    """A flashvar_tensor, the stride from part to part, and an array of addresses or NULL."""
    if stacked:
        (one,) = tensors
        return (*tensor_of(one[0]), one.stride(0), 0), None
    addresses = (ctypes.c_uint64 * len(tensors))(*(one.data_ptr() for one in tensors))
    return (*tensor_of(tensors[0]), 0, ctypes.addressof(addresses)), addresses


def _rows(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """A flashvar_tensor of [batch, seqlen, heads, head_dim]."""
    return (tensor.data_ptr(), *_strides(tensor)[:3])


def _log_sum_exps(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """A flashvar_tensor of [batch, heads, seqlen]."""
    batch, heads, seqlen = _strides(tensor)
    return (tensor.data_ptr(), batch, seqlen, heads)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """That of a dimension with one entry says nothing, and must not make rows look unaligned."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride if size > 1 else 0 for stride, size in pairs)
