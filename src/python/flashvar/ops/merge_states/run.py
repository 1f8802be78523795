"""A forward and a backward of merge_states, below autograd and the dispatcher.

What depends on shapes, strides, dtypes, devices and options alone is in a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from flashvar.ops.backend_choice import choose_backend
from flashvar.ops.merge_states.inputs import (
    batched,
    check,
    check_kinds,
    needs_copies,
    out_shape,
    output_layout,
    parts_of,
    rows_contiguous,
    rows_first,
    views_of,
)
from flashvar.ops.merge_states.problem import Backend, BackwardLaunch, ForwardLaunch, Wanted
from flashvar.ops.merge_states.spec import BACKWARD, FORWARD
from flashvar.ops.plans import Maker, Plans, maker
from flashvar.selection.candidates import CandidateResult

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of calls of one kind."""

    launch: ForwardLaunch | None  # None: there is nothing to compute
    copies: bool  # whether parts are copied, into strides that backends take
    make_out: Maker
    make_lse: Maker


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The plan of backwards of one kind."""

    launch: BackwardLaunch | None
    copies: bool
    wanted: Wanted
    make_outs: Maker
    make_lses: Maker


_plans: Plans[Plan] = Plans()
_backward_plans: Plans[BackwardPlan] = Plans()


def forward(
    outs: Tensors, lses: Tensors, stacked: bool, layout: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged output and its log-sum-exp."""
    plan = _plan(outs, lses, stacked, layout, backend)
    out, lse = plan.make_out(), plan.make_lse()
    if plan.launch is not None:
        parts = (parts_of if plan.copies else views_of)(outs, lses, stacked, layout)
        plan.launch(parts, rows_first(out, False, output_layout(layout)), batched(lse, False))
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
    if grad_out is None:
        check(outs, lses, stacked, layout)
        grad_out = outs[0].new_zeros(out_shape(outs[0], stacked, layout))
    grad_out = rows_first(rows_contiguous(grad_out), False, output_layout(layout))
    if grad_lse is not None:
        grad_lse = batched(grad_lse.contiguous(), False)
    options = (stacked, layout, backend, tuple(wanted))
    key = (*_key(outs, lses), grad_out.stride(), grad_lse is None, options)
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _make_backward(grad_out, grad_lse, outs, lses, *options)
        _backward_plans.keep(key, plan)
    grad_outs, grad_lses = plan.make_outs(), plan.make_lses()
    if plan.launch is not None:
        plan.launch(
            (parts_of if plan.copies else views_of)(outs, lses, stacked, layout),
            grad_out,
            grad_lse,
            rows_first(grad_outs, True, layout) if plan.wanted.outs else None,
            batched(grad_lses, True) if plan.wanted.lses else None,
        )
    return grad_outs, grad_lses


def _plan(outs: Tensors, lses: Tensors, stacked: bool, layout: str, backend: str) -> Plan:
    try:
        key = (*_key(outs, lses), stacked, layout, backend)
        found = _plans.get(key)
    # What has no strides, or cannot be hashed, is invalid: the checks say why.
    except (AttributeError, TypeError, RuntimeError):
        check_kinds(outs, lses, layout, backend)
        raise
    if found is None:
        found = _make(outs, lses, stacked, layout, backend)
        _plans.keep(key, found)
    return found


def _key(outs: Tensors, lses: Tensors) -> tuple[Any, ...]:
    """The key of plans of these tensors: all that they depend on."""
    return tuple([(x.shape, x.stride(), x.dtype, x.device) for x in (*outs, *lses)]), len(outs)


def _make(outs: Tensors, lses: Tensors, stacked: bool, layout: str, backend: str) -> Plan:
    check_kinds(outs, lses, layout, backend)
    check(outs, lses, stacked, layout)
    out, lse = like_forward(outs, lses, stacked, layout)
    launch = None
    if lse.numel() and not out.is_meta:
        chosen, implementation = _choose(FORWARD, outs[0], backend)
        parts = parts_of(outs, lses, stacked, layout)
        to = rows_first(out, False, output_layout(layout))
        launch = implementation.prepare_forward(chosen, parts, to, batched(lse, False))
    copies = needs_copies(outs, lses)
    return Plan(launch, copies, maker(out), maker(lse))


def _make_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    outs: Tensors,
    lses: Tensors,
    stacked: bool,
    layout: str,
    backend: str,
    wanted: Sequence[bool],
) -> BackwardPlan:
    check(outs, lses, stacked, layout)
    written = Wanted.of(wanted, len(outs), stacked)
    grad_outs, grad_lses = like_backward(outs, lses, stacked, wanted)
    launch = None
    if lses[0].numel() and (written.outs or written.lses) and not grad_out.is_meta:
        chosen, implementation = _choose(BACKWARD, outs[0], backend)
        launch = implementation.prepare_backward(
            chosen,
            parts_of(outs, lses, stacked, layout),
            grad_out,
            grad_lse,
            rows_first(grad_outs, True, layout) if written.outs else None,
            batched(grad_lses, True) if written.lses else None,
            written.skipped,
        )
    copies = needs_copies(outs, lses)
    return BackwardPlan(launch, copies, written, maker(grad_outs), maker(grad_lses))


def like_forward(
    outs: Tensors, lses: Tensors, stacked: bool, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a forward, not yet written."""
    lse_shape = tuple(lses[0].shape)[1 if stacked else 0 :]
    return outs[0].new_empty(out_shape(outs[0], stacked, layout)), lses[0].new_empty(lse_shape)


def like_backward(
    outs: Tensors, lses: Tensors, stacked: bool, wanted: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a backward, not yet written; no parts where none is wanted."""
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


def _choose(function: str, out: torch.Tensor, backend: str) -> tuple[CandidateResult, Backend]:
    return cast("tuple[CandidateResult, Backend]", choose_backend(function, out, backend))
