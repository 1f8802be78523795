"""A forward and a backward of merge_states, below autograd and the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import cast

import torch

from flashvar.backends import backend as backend_of
from flashvar.ops.dtypes import DTYPES
from flashvar.ops.merge_states.inputs import (
    batched,
    check,
    out_shape,
    output_layout,
    parts_of,
    rows_contiguous,
    rows_first,
)
from flashvar.ops.merge_states.problem import Backend, Wanted
from flashvar.ops.merge_states.spec import BACKWARD, FORWARD, SPEC
from flashvar.selection.candidates import CandidateResult
from flashvar.selection.request import Request
from flashvar.selection.resolve import choose

Tensors = Sequence[torch.Tensor]


def forward(
    outs: Tensors, lses: Tensors, stacked: bool, layout: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged output and its log-sum-exp."""
    check(outs, lses, stacked, layout)
    out, lse = like_forward(outs, lses, stacked, layout)
    if lse.numel():
        chosen, serves = _serving(FORWARD, outs[0], backend)
        parts = parts_of(outs, lses, stacked, layout)
        serves.forward(
            chosen, parts, rows_first(out, False, output_layout(layout)), batched(lse, False)
        )
    return out, lse


def backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    outs: Tensors,
    lses: Tensors,
    stacked: bool,
    layout: str,
    backend: str,
    wanted: Sequence[bool] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of outs and lses that are wanted, stacked. An absent one counts as zeros."""
    check(outs, lses, stacked, layout)
    written = Wanted.of(wanted, len(outs), stacked)
    grad_outs, grad_lses = like_backward(outs, lses, stacked, wanted)
    if not lses[0].numel() or not (written.outs or written.lses):
        return grad_outs, grad_lses
    if grad_out is None:
        grad_out = outs[0].new_zeros(out_shape(outs[0], stacked, layout))
    if grad_lse is not None:
        grad_lse = batched(grad_lse.contiguous(), False)
    chosen, serves = _serving(BACKWARD, outs[0], backend)
    serves.backward(
        chosen,
        parts_of(outs, lses, stacked, layout),
        rows_first(rows_contiguous(grad_out), False, output_layout(layout)),
        grad_lse,
        rows_first(grad_outs, True, layout) if written.outs else None,
        batched(grad_lses, True) if written.lses else None,
        written.skipped,
    )
    return grad_outs, grad_lses


def like_forward(
    outs: Tensors, lses: Tensors, stacked: bool, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a forward returns, not yet written."""
    lse_shape = tuple(lses[0].shape)[1 if stacked else 0 :]
    return outs[0].new_empty(out_shape(outs[0], stacked, layout)), lses[0].new_empty(lse_shape)


def like_backward(
    outs: Tensors, lses: Tensors, stacked: bool, wanted: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a backward returns, not yet written: without parts where none is wanted."""
    written = Wanted.of(wanted, len(outs), stacked)
    out, lse = outs[0], lses[0]
    if stacked:
        parts = out.shape[0]
        shapes = out.shape[1:], lse.shape[1:]
        counts = parts if written.outs else 0, parts if written.lses else 0
    else:
        shapes = out.shape, lse.shape
        counts = written.outs, len(lses) if written.lses else 0
    return out.new_empty((counts[0], *shapes[0])), lse.new_empty((counts[1], *shapes[1]))


def _serving(function: str, out: torch.Tensor, backend: str) -> tuple[CandidateResult, Backend]:
    device = out.device.index if out.is_cuda else None
    chosen = _choose(Request.of(function, DTYPES[out.dtype], device), backend)
    return chosen, cast("Backend", backend_of(chosen.backend, SPEC.name))


@cache
def _choose(request: Request, backend: str) -> CandidateResult:
    return choose(request, backend)
