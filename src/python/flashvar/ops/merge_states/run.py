"""A forward and a backward of merge_states, below autograd and the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from flashvar.ops.merge_states.inputs import (
    batched,
    check,
    out_shape,
    output_layout,
    parts_of,
    rows_contiguous,
    rows_first,
)
from flashvar.ops.merge_states.problem import Backend
from flashvar.ops.merge_states.spec import BACKWARD, FORWARD
from flashvar.ops.serving import serving
from flashvar.selection.candidates import CandidateResult

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of outs and lses, stacked. An absent gradient counts as zeros."""
    check(outs, lses, stacked, layout)
    grad_outs, grad_lses = like_backward(outs, lses, stacked)
    if not lses[0].numel():
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
        rows_first(grad_outs, True, layout),
        batched(grad_lses, True),
    )
    return grad_outs, grad_lses


def like_forward(
    outs: Tensors, lses: Tensors, stacked: bool, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a forward returns, not yet written."""
    lse_shape = tuple(lses[0].shape)[1 if stacked else 0 :]
    return outs[0].new_empty(out_shape(outs[0], stacked, layout)), lses[0].new_empty(lse_shape)


def like_backward(outs: Tensors, lses: Tensors, stacked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What a backward returns, not yet written."""
    front = () if stacked else (len(outs),)
    of_outs, of_lses = (x.new_empty((*front, *x.shape)) for x in (outs[0], lses[0]))
    return of_outs, of_lses


def _serving(function: str, out: torch.Tensor, backend: str) -> tuple[CandidateResult, Backend]:
    return cast("tuple[CandidateResult, Backend]", serving(function, out, backend))
