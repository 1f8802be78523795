"""A forward, a backward and an update of causal_conv1d, below autograd and the dispatcher.

What depends on shapes, strides, dtypes, devices and options alone is in a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar, cast

import torch

from flashvar.ops.causal_conv1d.inputs import (
    channels,
    check,
    check_kinds,
    check_state_len,
    check_update,
    convolution,
    rows_first,
)
from flashvar.ops.causal_conv1d.problem import (
    Backend,
    BackwardLaunch,
    Convolution,
    ForwardLaunch,
    Gradients,
    UpdateLaunch,
    make_convolution,
)
from flashvar.ops.causal_conv1d.spec import BACKWARD, FORWARD, UPDATE
from flashvar.ops.plans import Plans, prototype
from flashvar.ops.sequences import check_offsets, check_own_memory, check_state_indices
from flashvar.ops.serving import serving
from flashvar.selection.candidates import CandidateResult

Optional: TypeAlias = torch.Tensor | None
Four: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """How forwards of one kind are made."""

    launch: ForwardLaunch | None  # None: there is nothing to compute
    by_address: bool  # launch reads no shapes: views in the order of backends are not made
    # Prototypes of the outputs, without memory.
    y_like: torch.Tensor = field(repr=False)
    final_like: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """How backwards of one kind are made."""

    launch: BackwardLaunch | None  # None: there are no tokens and no states
    likes: Four = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How updates of one kind are made."""

    launch: UpdateLaunch | None
    by_address: bool  # as Plan's
    y_like: torch.Tensor = field(repr=False)


_P = TypeVar("_P", Plan, BackwardPlan, UpdatePlan)
_plans: Plans[Plan] = Plans()
_backward_plans: Plans[BackwardPlan] = Plans()
_update_plans: Plans[UpdatePlan] = Plans()
_empty_like: Final = torch.empty_like
_increment_version: Final = torch.autograd.graph.increment_version
_NAMES: Final = ("x", "weight", "bias", "residual", "initial_state", "cu_seqlens")
_UPDATE_NAMES: Final = (
    *("x", "state", "weight", "bias", "residual", "state_indices", "state_positions"),
)


def _plan(
    plans: Plans[_P],
    make: Callable[..., _P],
    names: tuple[str, ...],
    given: tuple[Any, ...],
    *options: Any,
    alignment: int = 0,
) -> _P:
    """The plan of calls with such tensors and options, the last of which are layout and backend."""
    try:
        key = (
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given],
            options,
            alignment,
        )
        found = plans.get(key)
    # What has no strides, or cannot be hashed, is invalid: the checks say why.
    except (AttributeError, TypeError, RuntimeError):
        check_kinds(dict(zip(names, given, strict=True)), None, *options[-2:])
        raise
    if found is None:
        check_kinds(dict(zip(names, given, strict=True)), None, *options[-2:])
        found = make(*given, *options)
        plans.keep(key, found)
    return found


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    residual: Optional,
    state: Optional,
    cu_seqlens: Optional,
    silu: bool,
    columns: int,
    layout: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the final state, which has `columns`."""
    given = (x, weight, bias, residual, state, cu_seqlens)
    plan = _plan(_plans, _make, _NAMES, given, silu, columns, layout, backend)
    if cu_seqlens is not None:
        check_offsets(cu_seqlens, x.shape[-2 if layout == "btd" else -1])
    y, final_state = _empty_like(plan.y_like), _empty_like(plan.final_like)
    if plan.by_address and plan.launch is not None:
        ends = None if cu_seqlens is None else cu_seqlens.contiguous()
        conv = make_convolution((x, weight, bias, state, ends, silu))
        plan.launch(conv, residual, y, final_state)
    elif plan.launch is not None:
        conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
        of_residual = None if residual is None else rows_first(residual, layout)
        plan.launch(conv, of_residual, rows_first(y, layout), final_state)
    return y, final_state


def _make(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    residual: Optional,
    state: Optional,
    cu_seqlens: Optional,
    silu: bool,
    columns: int,
    layout: str,
    backend: str,
) -> Plan:
    check(x, weight, bias, residual, state, cu_seqlens, layout)
    if columns:
        check_state_len(columns, weight, state)
    y, final_state = like_forward(x, state, cu_seqlens, columns, layout)
    launch, by_address = None, False
    if (y.numel() or final_state.numel()) and not x.is_meta:
        chosen, serves = _serving(FORWARD, x, backend)
        conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
        of_residual = None if residual is None else rows_first(residual, layout)
        of_y = rows_first(y, layout)
        launch = serves.prepare_forward(chosen, conv, of_residual, of_y, final_state)
        by_address = chosen.binary is not None
    return Plan(launch, by_address, prototype(y), prototype(final_state))


def backward(
    grad_y: Optional,
    grad_final: Optional,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    state: Optional,
    cu_seqlens: Optional,
    silu: bool,
    layout: str,
    backend: str,
) -> Four:
    """The gradients of x, weight, bias and state. An absent gradient counts as zeros."""
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    given = (grad_y, grad_final, x, weight, bias, state, cu_seqlens)
    names = ("grad_y", "grad_final", *_NAMES[:3], *_NAMES[4:])
    # The workspace depends on it.
    alignment = (x.data_ptr() | grad_y.data_ptr()) % 16
    options = (silu, layout, backend)
    plan = _plan(_backward_plans, _make_backward, names, given, *options, alignment=alignment)
    found = cast("Four", tuple([_empty_like(one) for one in plan.likes]))
    if plan.launch is None:
        for one in found:
            one.zero_()
        return found
    conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
    grads = _gradients(found, bias, state, layout)
    plan.launch(conv, rows_first(grad_y, layout), grad_final, grads)
    return found


def _make_backward(
    grad_y: torch.Tensor,
    grad_final: Optional,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    state: Optional,
    cu_seqlens: Optional,
    silu: bool,
    layout: str,
    backend: str,
) -> BackwardPlan:
    check(x, weight, bias, None, state, cu_seqlens, layout)
    found = like_backward(x, weight, bias, state)
    launch = None
    if (x.numel() or found[3].numel()) and not x.is_meta:
        chosen, serves = _serving(BACKWARD, x, backend)
        conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
        grads = _gradients(found, bias, state, layout)
        launch = serves.prepare_backward(
            chosen, conv, rows_first(grad_y, layout), grad_final, grads
        )
    return BackwardPlan(launch, cast("Four", tuple(prototype(one) for one in found)))


def _gradients(found: Four, bias: Optional, state: Optional, layout: str) -> Gradients:
    of_x, of_weight, of_bias, of_state = found
    return Gradients(
        rows_first(of_x, layout),
        of_weight,
        None if bias is None else of_bias,
        None if state is None else of_state,
    )


def update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    residual: Optional,
    state_indices: Optional,
    state_positions: Optional,
    silu: bool,
    layout: str,
    backend: str,
) -> torch.Tensor:
    """The output; the state is written."""
    given = (x, state, weight, bias, residual, state_indices, state_positions)
    plan = _plan(_update_plans, _make_update, _UPDATE_NAMES, given, silu, layout, backend)
    if state_indices is not None:
        state_indices = state_indices.contiguous()
        check_state_indices(state_indices, state.shape[0])
    y = _empty_like(plan.y_like)
    if plan.launch is None:
        return y
    if not state.is_inference():  # so that a backward that kept the state refuses
        _increment_version(state)
    if state_positions is not None:
        state_positions = state_positions.contiguous()
    if plan.by_address:
        conv = make_convolution((x, weight, bias, state, None, silu))
        plan.launch(conv, residual, state_indices, state_positions, y)
        return y
    conv, of_residual, of_y = _update_views(x, state, weight, bias, residual, y, silu, layout)
    plan.launch(conv, of_residual, state_indices, state_positions, of_y)
    return y


def _make_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    residual: Optional,
    state_indices: Optional,
    state_positions: Optional,
    silu: bool,
    layout: str,
    backend: str,
) -> UpdatePlan:
    check_update(x, state, weight, bias, residual, state_indices, state_positions, layout)
    check_own_memory("state", state)
    y, launch, by_address = torch.empty_like(x), None, False
    if x.numel() and not x.is_meta:
        chosen, serves = _serving(UPDATE, x, backend)
        conv, of_residual, of_y = _update_views(x, state, weight, bias, residual, y, silu, layout)
        launch = serves.prepare_update(
            chosen, conv, of_residual, state_indices, state_positions, of_y
        )
        by_address = chosen.binary is not None
    return UpdatePlan(launch, by_address, prototype(y))


def _update_views(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    residual: Optional,
    y: torch.Tensor,
    silu: bool,
    layout: str,
) -> tuple[Convolution, Optional, torch.Tensor]:
    """The tensors of an update in the order of backends."""
    conv = convolution(of_tokens(x, layout), weight, bias, state, None, silu, layout)
    of_residual = None if residual is None else rows_first(of_tokens(residual, layout), layout)
    return conv, of_residual, rows_first(of_tokens(y, layout), layout)


def of_tokens(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A view of [batch, dim] as one token each."""
    return x if x.dim() == 3 else x.unsqueeze(1 if layout == "btd" else 2)


def like_forward(
    x: torch.Tensor, state: Optional, cu_seqlens: Optional, columns: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a forward returns, not yet written."""
    batch = 1 if x.dim() == 2 else x.shape[0]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    like = x if state is None else state
    return torch.empty_like(x), like.new_empty(sequences, channels(x, layout), columns)


def like_backward(x: torch.Tensor, weight: torch.Tensor, bias: Optional, state: Optional) -> Four:
    """What a backward returns, not yet written; of what is absent an empty tensor."""
    return (
        torch.empty_like(x),
        weight.new_empty(weight.shape),
        *(x.new_empty(0) if one is None else one.new_empty(one.shape) for one in (bias, state)),
    )


def _serving(function: str, x: torch.Tensor, backend: str) -> tuple[CandidateResult, Backend]:
    return cast("tuple[CandidateResult, Backend]", serving(function, x, backend))
