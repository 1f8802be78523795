"""Forwards and backwards of the kernels, below autograd and the dispatcher.

What depends on shapes, strides, dtypes, devices and options alone is in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from flashvar.ops.plans import Maker, Plans, maker
from flashvar.ops.rms_norm.formula import Norm, Tensors

Optional: TypeAlias = torch.Tensor | None
# Takes the result, the sum of x and the residual, and a tuple like Tensors.
ForwardLaunch: TypeAlias = Callable[[torch.Tensor, Optional, Sequence[Optional]], None]
# Takes the gradients, in the order of Tensors, and what BackwardPlan.run takes.
BackwardLaunch: TypeAlias = Callable[[Sequence[Optional], Sequence[Optional]], None]
# Which tensors' gradients are wanted, in the order of Tensors.
Wanted: TypeAlias = tuple[bool, ...]
ALL: Final[Wanted] = (True,) * len(Tensors._fields)


@dataclass(frozen=True, slots=True)
class Plan:
    """How forwards of one kind are made."""

    norm: Norm
    launch: ForwardLaunch | None  # None: there are no rows
    make_y: Maker
    make_total: Maker | None  # None: the sum is not wanted

    def run(self, *tensors: Optional) -> tuple[torch.Tensor, Optional]:
        """The result, and the sum of x and the residual if it is wanted."""
        y = self.make_y()
        total = None if self.make_total is None else self.make_total()
        if self.launch is not None:
            self.launch(y, total, tensors)
        return y, total


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """How backwards of one kind are made."""

    launch: BackwardLaunch | None  # None: there are no rows
    makers: tuple[Maker | None, ...]  # in the order of Tensors; None: no such gradient is made
    shares: bool  # whether the gradient of the residual is that of x: they have one dtype

    def run(self, *given: Optional) -> list[Any]:
        """The gradients of tensors that follow those of the results; None of those not wanted."""
        grads: list[Any] = [None if make is None else make() for make in self.makers]
        if self.launch is not None:
            self.launch(grads, given)
        else:
            for grad in grads:
                if grad is not None:
                    grad.zero_()
        if self.shares:
            grads[-1] = grads[0]
        return grads


_plans: Plans[Plan] = Plans()
_backward_plans: Plans[BackwardPlan] = Plans()


def known(tensors: tuple[Any, ...], norm: tuple[Any, ...]) -> tuple[Plan, bool] | None:
    """The plan of a recent forward like this one, and whether autograd records it.

    Arguments of any kind. None where a check has to see them, or something in torch the call.
    """
    try:
        return _plans.recent((norm, tensors[0].shape), tensors)
    # What has no shape, or cannot be hashed, is not for the kernels.
    except (AttributeError, RuntimeError, TypeError):
        return None


def remember(tensors: tuple[Any, ...], norm: tuple[Any, ...], found: Plan) -> None:
    """Let `known` find the plan of a call of plain tensors that nothing in torch intercepts."""
    _plans.remember((norm, tensors[0].shape), tensors, found)


def plan(tensors: Tensors, norm: Norm) -> Plan:
    """The plan of a forward that the kernels run, made at the first of its kind."""
    key = _key(tensors), norm
    found = _plans.get(key)
    if found is None:
        found = _make(tensors, norm)
        _plans.keep(key, found)
    return found


def known_backward(given: tuple[Optional, ...], norm: Norm, wanted: Wanted) -> BackwardPlan | None:
    """The plan of a recent backward like this one.

    None where autograd records it, for derivatives of higher order.
    """
    recent = _backward_plans.recent((norm, wanted), given)
    return None if recent is None or recent[1] else recent[0]


def gradients(given: tuple[Any, ...], norm: Norm, wanted: Wanted = ALL) -> list[Any]:
    """The gradients of tensors that follow those of the results; the kernels run the call."""
    key = _key(given), norm, wanted
    found = _backward_plans.get(key)
    if found is None:
        found = _make_backward(given, norm, wanted)
        _backward_plans.keep(key, found)
    _backward_plans.remember((norm, wanted), given, found)
    return found.run(*given)


def _key(tensors: Sequence[Optional]) -> tuple[Any, ...]:
    """What plans of these tensors depend on."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def _make(tensors: Tensors, norm: Norm) -> Plan:
    from flashvar.backends.triton import rms_norm

    x = tensors.x
    launch = rms_norm.prepare_forward(tensors, norm) if x.numel() else None
    make_total = None
    if norm.total_dtype is not None:
        make_total = maker(x.new_empty(x.shape, dtype=norm.total_dtype))
    return Plan(norm, launch, maker(x.new_empty(x.shape, dtype=norm.dtype)), make_total)


def _make_backward(given: tuple[Any, ...], norm: Norm, wanted: Wanted) -> BackwardPlan:
    from flashvar.backends.triton import rms_norm

    tensors = Tensors._make(given[2:])
    x, *_, residual = tensors
    launch = rms_norm.prepare_backward(given, norm) if x.numel() else None
    shares = residual is not None and residual.dtype == x.dtype
    made = (True, *wanted[1:-1], wanted[-1] and not shares)
    makers = tuple(
        None if one is None or not is_made else maker(one.new_empty(one.shape))
        for one, is_made in zip(tensors, made, strict=True)
    )
    return BackwardPlan(launch, makers, shares)
