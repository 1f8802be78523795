"""A forward, a backward and an update of causal_conv1d, below autograd and the dispatcher.

What depends on shapes, strides, dtypes, devices and options alone is in a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

import torch

from flashvar.ops.backend_choice import BackendFallback, choose_backend
from flashvar.ops.causal_conv1d.inputs import (
    WIDTHS,
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
from flashvar.ops.plans import Maker, Plans, maker
from flashvar.ops.sequences import check_offsets, check_own_memory, check_state_indices
from flashvar.selection.candidates import CandidateResult

Optional: TypeAlias = torch.Tensor | None
Four: TypeAlias = tuple[torch.Tensor, torch.Tensor, Optional, Optional]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of forwards of one kind."""

    launch: ForwardLaunch | None  # None: there is nothing to compute
    by_address: bool  # launch reads no shapes: views in the order of backends are not made
    options: tuple[bool, int, str, str]  # silu, columns, layout, backend
    make_y: Maker
    make_final: Maker

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional,
        residual: Optional,
        state: Optional,
        cu_seqlens: Optional,
    ) -> tuple[torch.Tensor, Optional]:
        """The output, and the final state; None where that may be left out: it has no columns."""
        silu, columns, layout, _ = self.options
        if cu_seqlens is not None:
            check_offsets(cu_seqlens, x.shape[-2 if layout == "btd" else -1])
        y = self.make_y()
        if self.by_address and self.launch is not None:
            final_state = self.make_final() if columns else None
            ends = None if cu_seqlens is None else cu_seqlens.contiguous()
            conv = make_convolution((x, weight, bias, state, ends, silu))
            self.launch(conv, residual, y, final_state)
            return y, final_state
        final_state = self.make_final()
        if self.launch is not None:
            conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
            of_residual = None if residual is None else rows_first(residual, layout)
            self.launch(conv, of_residual, rows_first(y, layout), final_state)
        return y, final_state


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The plan of backwards of one kind."""

    launch: BackwardLaunch | None  # None: there are no tokens and no states
    alignment: tuple[int, int]  # of x and the gradient of y
    options: tuple[bool, str]  # silu, layout
    makers: tuple[Maker, Maker, Maker | None, Maker | None]

    def run(
        self,
        grad_y: torch.Tensor,
        grad_final: Optional,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional,
        state: Optional,
        cu_seqlens: Optional,
    ) -> Four:
        """The gradients of x, weight, bias and state; None for absent tensors."""
        make_x, make_weight, make_bias, make_state = self.makers
        found: Four = (
            make_x(),
            make_weight(),
            None if make_bias is None else make_bias(),
            None if make_state is None else make_state(),
        )
        if self.launch is None:
            for one in found:
                if one is not None:
                    one.zero_()
            return found
        silu, layout = self.options
        conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
        grads = Gradients(rows_first(found[0], layout), *found[1:])
        self.launch(conv, rows_first(grad_y, layout), grad_final, grads)
        return found


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The plan of updates of one kind."""

    launch: UpdateLaunch | None
    by_address: bool  # as Plan's
    options: tuple[bool, str]  # silu, layout
    make_y: Maker

    def run(
        self,
        x: torch.Tensor,
        state: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional,
        residual: Optional,
        state_indices: Optional,
        state_positions: Optional,
    ) -> torch.Tensor:
        """The output; the state is written."""
        if state_indices is not None:
            state_indices = state_indices.contiguous()
            check_state_indices(state_indices, state.shape[0])
        y = self.make_y()
        if self.launch is None:
            return y
        if not state.is_inference():  # so that a backward that kept the state refuses
            _increment_version(state)
        if state_positions is not None:
            state_positions = state_positions.contiguous()
        silu, layout = self.options
        if self.by_address:
            conv = make_convolution((x, weight, bias, state, None, silu))
            self.launch(conv, residual, state_indices, state_positions, y)
            return y
        conv, of_residual, of_y = _update_views(x, state, weight, bias, residual, y, silu, layout)
        self.launch(conv, of_residual, state_indices, state_positions, of_y)
        return y


_P = TypeVar("_P", Plan, BackwardPlan, UpdatePlan)
_plans: Plans[Plan] = Plans()
_backward_plans: Plans[BackwardPlan] = Plans()
_update_plans: Plans[UpdatePlan] = Plans()
_increment_version: Final = torch.autograd.graph.increment_version
_NAMES: Final = ("x", "weight", "bias", "residual", "initial_state", "cu_seqlens")
UPDATE_NAMES: Final = (
    *("x", "state", "weight", "bias", "residual", "state_indices", "state_positions"),
)


def _plan(
    plans: Plans[_P],
    make: Callable[..., _P],
    names: tuple[str, ...],
    given: tuple[Any, ...],
    *options: Any,
    alignment: tuple[int, int] = (0, 0),
) -> _P:
    """The plan of calls with such tensors and options, the last of which are layout and backend."""
    try:
        key = (
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given],
            options,
            tuple(map(type, options)),  # equal options of other types may be invalid
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


def known(options: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Plan, bool] | None:
    """The plan of a recent forward like this one, and whether autograd records it.

    Options and tensors are those of the public function, of any kind. None where a check has to see
    them, or something in torch the call.
    """
    return _recent(_plans, options, given)


def known_update(
    options: tuple[Any, ...], given: tuple[Any, ...]
) -> tuple[UpdatePlan, bool] | None:
    """The plan of a recent update like this one, as `known`."""
    return _recent(_update_plans, options, given)


def remember(options: tuple[Any, ...], given: tuple[Any, ...], plan: Plan) -> None:
    """Let `known` find the plan of a call of plain tensors that nothing in torch intercepts."""
    _plans.remember((options, tuple(map(type, options)), given[0].shape), given, plan)


def remember_update(options: tuple[Any, ...], given: tuple[Any, ...], plan: UpdatePlan) -> None:
    """Let `known_update` find the plan of an update, as `remember`."""
    _update_plans.remember((options, tuple(map(type, options)), given[0].shape), given, plan)


def _recent(plans: Plans[_P], options: tuple[Any, ...], given: Any) -> tuple[_P, bool] | None:
    try:
        return plans.recent((options, tuple(map(type, options)), given[0].shape), given)
    # What has no shape, or cannot be hashed, is invalid: the checks say why.
    except (AttributeError, RuntimeError, TypeError):
        return None


def plan(*arguments: Any) -> Plan:
    """The plan of a forward, whose arguments come in the order of the schema."""
    return _plan(_plans, _make, _NAMES, arguments[:6], *arguments[6:])


def update_plan(*arguments: Any) -> UpdatePlan:
    """The plan of an update, whose arguments come in the order of the schema."""
    return _plan(_update_plans, _make_update, UPDATE_NAMES, arguments[:7], *arguments[7:])


def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the final state."""
    found = plan(*arguments)
    y, final_state = found.run(*arguments[:6])
    return y, found.make_final() if final_state is None else final_state


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
        chosen, implementation = _choose(FORWARD, x, weight, backend)
        conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
        of_residual = None if residual is None else rows_first(residual, layout)
        of_y = rows_first(y, layout)
        launch = implementation.prepare_forward(chosen, conv, of_residual, of_y, final_state)
        by_address = chosen.binary is not None
    options = (silu, columns, layout, backend)
    return Plan(launch, by_address, options, maker(y), maker(final_state))


def backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of x, weight, bias and state; empty for absent tensors."""
    found = gradients(arguments[:7], arguments[7:])
    x: torch.Tensor = arguments[2]
    return tuple(x.new_empty(0) if one is None else one for one in found)


def gradients(given: tuple[Any, ...], options: tuple[Any, ...]) -> Four:
    """As `backward`; None for absent tensors. An absent gradient of a result counts as zeros."""
    found = known_backward(given, options)
    if found is not None:
        return found.run(*given)
    grad_y, grad_final, x, *others = given
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    tensors = (grad_y, grad_final, x, *others)
    names = ("grad_y", "grad_final", *_NAMES[:3], *_NAMES[4:])
    alignment = _alignment(x, grad_y)
    found = _plan(_backward_plans, _make_backward, names, tensors, *options, alignment=alignment)
    if given[0] is not None:
        _backward_plans.remember(options, given, found)
    return found.run(*tensors)


def known_backward(given: tuple[Any, ...], options: tuple[Any, ...]) -> BackwardPlan | None:
    """The plan of a recent backward like this one, which has a gradient of y.

    None where autograd records it, for derivatives of higher order.
    """
    recent = _backward_plans.recent(options, given)
    if recent is None:
        return None
    plan, records = recent
    if records or plan.alignment != _alignment(given[2], given[0]):
        return None
    return plan


def _alignment(x: torch.Tensor, grad_y: torch.Tensor) -> tuple[int, int]:
    """Distances of the addresses from multiples of 16 bytes, on which the workspace depends."""
    return x.data_ptr() % 16, grad_y.data_ptr() % 16


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
    of_x, of_weight, *others = like_backward(x, weight, bias, state)
    of_bias, of_state = (
        None if one is None else like for one, like in zip((bias, state), others, strict=True)
    )
    launch = None
    if (x.numel() or (of_state is not None and of_state.numel())) and not x.is_meta:
        chosen, implementation = _choose(BACKWARD, x, weight, backend)
        conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
        grads = Gradients(rows_first(of_x, layout), of_weight, of_bias, of_state)
        launch = implementation.prepare_backward(
            chosen, conv, rows_first(grad_y, layout), grad_final, grads
        )
    makers = (
        maker(of_x),
        maker(of_weight),
        None if of_bias is None else maker(of_bias),
        None if of_state is None else maker(of_state),
    )
    return BackwardPlan(launch, _alignment(x, grad_y), (silu, layout), makers)


def update(*arguments: Any) -> torch.Tensor:
    """The output; the state is written."""
    return update_plan(*arguments).run(*arguments[:7])


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
        chosen, implementation = _choose(UPDATE, x, weight, backend)
        conv, of_residual, of_y = _update_views(x, state, weight, bias, residual, y, silu, layout)
        launch = implementation.prepare_update(
            chosen, conv, of_residual, state_indices, state_positions, of_y
        )
        by_address = chosen.binary is not None
    return UpdatePlan(launch, by_address, (silu, layout), maker(y))


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
    """The results of a forward, not yet written."""
    batch = 1 if x.dim() == 2 else x.shape[0]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    like = x if state is None else state
    return torch.empty_like(x), like.new_empty(sequences, channels(x, layout), columns)


def like_backward(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional, state: Optional
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of a backward, not yet written; empty tensors for absent inputs."""
    return (
        torch.empty_like(x),
        weight.new_empty(weight.shape),
        *(x.new_empty(0) if one is None else one.new_empty(one.shape) for one in (bias, state)),
    )


def _choose(
    function: str, x: torch.Tensor, weight: torch.Tensor, backend: str
) -> tuple[CandidateResult, Backend]:
    """The backend that runs a call, and how it was chosen."""
    found = choose_backend(function, x, backend, fallback=partial(_fallback, weight.shape[1]))
    return cast("tuple[CandidateResult, Backend]", found)


def _fallback(width: int, chosen: str) -> BackendFallback | None:
    """What runs a call in place of the chosen backend; None where that runs it."""
    if chosen == "reference" or width in WIDTHS:
        return None
    reason = f"kernels take filters of {WIDTHS[0]} to {WIDTHS[-1]} taps, not {width}"
    return BackendFallback("reference", reason, "shorten the filters")
