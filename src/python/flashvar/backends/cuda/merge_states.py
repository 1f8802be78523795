"""merge_states through a compiled binary: the C structs of `merge_states.h`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from flashvar.backends.cuda.call import CALL, DTYPES, TENSOR, call_head, function_of, launch_of
from flashvar.ops.dtypes import DTYPES as NAMES
from flashvar.ops.merge_states.spec import BACKWARD, FORWARD

if TYPE_CHECKING:
    from flashvar.ops.merge_states.problem import BackwardLaunch, ForwardLaunch, Parts
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
# The kernels want no workspace.
_WORKSPACE: Final = (0, 0)


# Packs the problem's struct of a call; beside it is what has to live until the call is made.
_Pack = Callable[["Parts"], "tuple[bytes, object]"]


def prepare_forward(
    chosen: CandidateResult, parts: Parts, out: torch.Tensor, lse: torch.Tensor
) -> ForwardLaunch:
    """The launch that writes the merged out and its log-sum-exp."""
    function, device = function_of(FORWARD, chosen, out.device.index)
    packed, run = _pack_forward(device, parts, out), launch_of(function, FORWARD, chosen)

    def launch(parts: Parts, out: torch.Tensor, lse: torch.Tensor) -> None:
        params, _kept = packed(parts, out, lse)
        run(params)

    return launch


def explain_forward(
    chosen: CandidateResult, parts: Parts, out: torch.Tensor, lse: torch.Tensor
) -> str:
    """How the binary reads the rows of a call, and why."""
    function, device = function_of(FORWARD, chosen, out.device.index)
    params, _kept = _pack_forward(device, parts, out)(parts, out, lse)
    return function.explain(params)


def _pack_forward(
    device: int, parts: Parts, out: torch.Tensor
) -> Callable[[Parts, torch.Tensor, torch.Tensor], tuple[bytes, object]]:
    head, of_out, pack = call_head(_FORWARD, device), _row_strides(out), _problem(parts, out)

    def packed(parts: Parts, out: torch.Tensor, lse: torch.Tensor) -> tuple[bytes, object]:
        problem, kept = pack(parts)
        stream = torch._C._cuda_getCurrentRawStream(device)
        fields = (head, stream, *_WORKSPACE, out.data_ptr(), *of_out, lse.data_ptr(), problem)
        return _FORWARD.pack(*fields), kept

    return packed


def prepare_backward(
    chosen: CandidateResult,
    parts: Parts,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grad_outs: torch.Tensor | None,
    grad_lses: torch.Tensor | None,
    skipped: int,
) -> BackwardLaunch:
    """The launch that writes the gradients that are wanted, stacked."""
    function, device = function_of(BACKWARD, chosen, grad_out.device.index)
    head, pack = call_head(_BACKWARD, device), _problem(parts, grad_out)
    of_grad_out, run = _row_strides(grad_out), launch_of(function, BACKWARD, chosen)
    of_grad_outs = (
        (0, 0, 0, 0) if grad_outs is None else (*_row_strides(grad_outs[0]), grad_outs.stride(0))
    )

    def launch(
        parts: Parts,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grad_outs: torch.Tensor | None,
        grad_lses: torch.Tensor | None,
    ) -> None:
        problem, _kept = pack(parts)
        stream = torch._C._cuda_getCurrentRawStream(device)
        fields = (head, stream, *_WORKSPACE, grad_out.data_ptr(), *of_grad_out, _address(grad_lse))
        of_parts = (_address(grad_outs), *of_grad_outs, _address(grad_lses))
        run(_BACKWARD.pack(*fields, *of_parts, problem, skipped))

    return launch


def _problem(parts: Parts, out: torch.Tensor) -> _Pack:
    """Packs the problem's struct of calls like this one."""
    if len(parts.outs) > _MAX_ADDRESSES:
        pack_stacked = _problem(parts.as_stacked(), out)

        def pack_copies(parts: Parts) -> tuple[bytes, object]:
            copies = parts.as_stacked()
            return pack_stacked(copies)[0], copies

        return pack_copies
    sizes = (*out.shape, DTYPES[NAMES[out.dtype]], parts.count)
    first_out, first_lse = parts.outs[0], parts.lses[0]
    if parts.stacked:
        of_outs = (*_row_strides(first_out[0]), first_out.stride(0))
        of_lses = (*_lse_strides(first_lse[0]), first_lse.stride(0))

        def pack_whole(parts: Parts) -> tuple[bytes, object]:
            outs, lses = parts.outs[0].data_ptr(), parts.lses[0].data_ptr()
            return _PROBLEM.pack(*sizes, outs, *of_outs, 0, lses, *of_lses, 0), None

        return pack_whole
    of_outs, of_lses = (*_row_strides(first_out), 0), (*_lse_strides(first_lse), 0)
    array = ctypes.c_uint64 * len(parts.outs)

    def pack_listed(parts: Parts) -> tuple[bytes, object]:
        outs = array(*[one.data_ptr() for one in parts.outs])
        lses = array(*[one.data_ptr() for one in parts.lses])
        at_outs, at_lses = ctypes.addressof(outs), ctypes.addressof(lses)
        fields = (*sizes, outs[0], *of_outs, at_outs, lses[0], *of_lses, at_lses)
        return _PROBLEM.pack(*fields), (outs, lses)

    return pack_listed


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a flashvar_tensor, of [batch, seqlen, heads, head_dim]."""
    return _strides(tensor)[:3]


def _lse_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The strides of a flashvar_tensor, of [batch, heads, seqlen]."""
    batch, heads, seqlen = _strides(tensor)
    return batch, seqlen, heads


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides; 0 for dimensions with one entry: theirs may be any, and make rows look unaligned."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride if size > 1 else 0 for stride, size in pairs)
