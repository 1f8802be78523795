"""The derivatives of gated_delta_rule: first ones in reverse mode, at any depth of transforms.

Traced and transformed calls come through the Autograd key of the ops. Plain tensors take
`differentiable`, which skips the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.derivatives import (
    Refused,
    attach,
    below_autograd,
    may_be_differentiated,
    nothing_intercepts,
    plain_apply,
    skips_dispatcher,
)
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.ops.gated_delta_rule import run
from flashvar.ops.gated_delta_rule.spec import BACKWARD
from flashvar.ops.profiling import recorded

_INSTEAD: Final = "write the recurrence in torch's own functions there"
_NO_SECOND: Final = (
    "gated_delta_rule has first derivatives only, found a request for the second (a backward "
    f"through create_graph=True, torch.func.grad of a gradient, a Hessian): {_INSTEAD}"
)
_NO_FORWARD_MODE: Final = (
    "gated_delta_rule has no forward-mode derivative, found an input with a tangent (jvp, jacfwd "
    f"or a dual tensor): use reverse mode, or {_INSTEAD}"
)
# Tensors of a forward: the states, and the others in the order of the schemas.
_TENSORS: Final = 9
# Indices of arguments of _Dispatched that have gradients, in the order of the backward's results.
_OF_DISPATCHED: Final = (2, 3, 4, 5, 6, 7, 8, 1)


class _Plain(torch.autograd.Function):  # type: ignore[misc]
    """The forward of plain tensors, and its gradients. `given` has no indices."""

    @staticmethod
    def forward(ctx: Any, plan: run.Plan, with_state: bool, *given: Any) -> Any:
        ctx.save_for_backward(given[-1], *given[:-1])
        ctx.options = plan.options
        out, final_state = plan.run((*given, None), with_state)
        if not with_state:
            return out
        # The gradient of an unused output is None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return out, final_state

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_final: Any = None) -> Any:
        if grad_out is None and grad_final is None:
            return (None,) * (_TENSORS + 2)
        # Autograd drops those that it does not need.
        *grads, of_state = _gradients_of(ctx, grad_out, grad_final)
        return (None, None, *grads, None, of_state)


class _Gradients(Refused):
    """The gradients of a backward, which have no derivatives."""

    no_reverse_mode = _NO_SECOND
    no_forward_mode = _NO_FORWARD_MODE


class _Dispatched(_Gradients):
    """The results of a forward that went through the dispatcher."""

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Any) -> None:
        super().setup_context(ctx, inputs, output)
        ctx.save_for_backward(*inputs[1 : 1 + _TENSORS])
        ctx.options = inputs[1 + _TENSORS :]

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_final: Any) -> Any:
        needed = ctx.needs_input_grad
        found: list[Any] = [None] * len(needed)
        if grad_out is None and grad_final is None:
            return tuple(found)
        grads = _gradients_of(ctx, grad_out, grad_final)
        for index, grad in zip(_OF_DISPATCHED, grads, strict=True):
            if needed[index]:
                found[index] = grad
        return tuple(found)


class _Updated(Refused):
    """The results of an update, which have no derivatives."""

    no_reverse_mode = (
        "gated_delta_rule_update has no derivatives, found a request for a gradient: call "
        "gated_delta_rule without state_indices, which has them"
    )
    no_forward_mode = (
        "gated_delta_rule_update has no derivatives, found an input with a tangent: call it with "
        "plain tensors"
    )
    written = (1,)  # states


def _gradients_of(ctx: Any, grad_out: Any, grad_final: Any) -> Sequence[Any]:
    """The gradients of the tensors that a forward saved, in the order of the backward's results."""
    given = (grad_out, grad_final, *ctx.saved_tensors)
    plan = None if is_compiling() else run.known_backward(given, ctx.options)
    grads: Sequence[Any]
    if plan is not None:
        grads = recorded(BACKWARD, plan.run)(given)
    elif skips_dispatcher(*given):
        grads = recorded(BACKWARD, run.gradients)(given, ctx.options)
    else:
        found = torch.ops.flashvar.gated_delta_rule_bwd.default(*given, *ctx.options)
        _, _, state, *tensors, _ = given
        pairs = zip((*tensors, state), found, strict=True)
        grads = [None if x is None else grad for x, grad in pairs]
    return grads


_apply: Final = plain_apply(_Plain)


def differentiable(
    plan: run.Plan, given: tuple[torch.Tensor | None, ...], with_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the plan's run, of plain tensors, recorded by autograd."""
    results = _apply(plan, with_state, *given[:_TENSORS])
    if not with_state:
        return results, None
    out, final_state = results
    return out, final_state


def forward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of gated_delta_rule_fwd."""
    # The schema has the initial state first; plans have it after the inputs, then the indices.
    given = (*arguments[1:_TENSORS], arguments[0], None)
    plan = _plan_without_autograd(given, arguments[_TENSORS:])
    if plan is not None:
        return plan.run(given, True)
    op = torch.ops.flashvar.gated_delta_rule_fwd.default
    results = below_autograd(op, run.forward, keyset, arguments)
    if not may_be_differentiated(*arguments[:_TENSORS]):
        return results
    return attach(_Dispatched, results, *arguments)


def backward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of gated_delta_rule_bwd."""
    op = torch.ops.flashvar.gated_delta_rule_bwd.default
    results = below_autograd(op, run.backward, keyset, arguments)
    if not may_be_differentiated(*arguments[: 2 + _TENSORS]):
        return results
    return attach(_Gradients, results, *arguments)


def update_at_autograd_key(keyset: Any, states: Any, *arguments: Any) -> Any:
    """The Autograd kernel of gated_delta_rule_update."""
    if torch.is_grad_enabled() and states.requires_grad:
        raise InvalidInputError(
            "states must not require a gradient to be written in place, found one that does: "
            "detach them, or call gated_delta_rule without state_indices"
        )
    indices, *of_inputs = arguments[:_TENSORS]
    given = (*of_inputs, states, indices)
    plan = _plan_without_autograd(given, arguments[_TENSORS:])
    if plan is not None:
        return plan.run(given, True)[0]
    op = torch.ops.flashvar.gated_delta_rule_update.default
    out = below_autograd(op, run.update, keyset, (states, *arguments))
    tensors = [x for x in (states, *arguments[:_TENSORS]) if x is not None]
    if not may_be_differentiated(*tensors):
        return out
    return attach(_Updated, (out,), *tensors)[0]


def _plan_without_autograd(
    given: tuple[torch.Tensor | None, ...], options: tuple[Any, ...]
) -> run.Plan | None:
    """The plan of a call at the Autograd key that has been made before.

    None where torch has to see the call, or autograd.
    """
    recent = run.known(given, options) if nothing_intercepts(*given) else None
    return None if recent is None or recent[1] else recent[0]
