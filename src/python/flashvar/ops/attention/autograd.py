"""The derivative of attention: autograd functions, and the kernels of the Autograd key.

Traced and transformed calls come through the Autograd key of the op. Plain tensors take
`differentiable`, which skips the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.attention import plan as plans
from flashvar.ops.attention import run
from flashvar.ops.attention.plan import Plan
from flashvar.ops.attention.problem import Inputs, Options, Wanted, inputs_of
from flashvar.ops.attention.spec import BACKWARD
from flashvar.ops.attention.validate import rows_contiguous
from flashvar.ops.derivatives import (
    Refused,
    attach,
    below_autograd,
    may_be_differentiated,
    nothing_intercepts,
    plain_apply,
    skips_dispatcher,
)
from flashvar.ops.dispatch_modes import are_plain, is_compiling
from flashvar.ops.profiling import recorded

_TENSORS: Final = len(Inputs._fields)
# Arguments of a forward before its tensors; then those that may have gradients, in this order.
_BEFORE: Final = 2
_Q, _K, _V = range(_BEFORE, _BEFORE + 3)
_BIAS, _SINKS = (_BEFORE + Inputs._fields.index(name) for name in ("bias", "sinks"))
_OF_OTHERS: Final = (None,) * (_BEFORE + _TENSORS - 1 - _SINKS)
_NOTHING_MORE: Final = Wanted()
# Saved tensors: q, k and v, and the results; more of them where the fields of Inputs are given.
_PLAIN, _RESULTS = 3, 2
_SLOPES: Final = Inputs._fields.index("alibi_slopes")

_INSTEAD: Final = "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH there"
_NO_SECOND: Final = (
    "flashvar.attention has first derivatives only, found a request for the second (a backward "
    f"through create_graph=True, torch.func.grad of a gradient, a Hessian): use {_INSTEAD}"
)
_NO_FORWARD_MODE: Final = (
    "flashvar.attention has no forward-mode derivative, found an input with a tangent (jvp, jacfwd "
    f"or a dual tensor): use reverse mode, or {_INSTEAD}"
)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The forward of plain tensors, and its gradients.

    `given` are the fields of Inputs, or q, k and v alone.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, with_lse: bool, *given: Any) -> Any:
        out, lse = plan.run(given, True)
        ctx.save_for_backward(*given, out, lse)
        ctx.options = plan.options
        if not with_lse:
            return out
        # The gradient of an unused output is None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any = None) -> Any:
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        saved, wanted = ctx.saved_tensors, _NOTHING_MORE
        if len(saved) > _RESULTS + _PLAIN:
            needed = ctx.needs_input_grad
            wanted = Wanted(needed[_BIAS], needed[_SINKS])
        # Autograd drops those that it does not need.
        grads = _gradients_of((grad_out, grad_lse), saved, ctx.options, wanted)
        return (None, None, *grads, *_OF_OTHERS)


class _Gradients(Refused):
    """The gradients of a backward, which have no derivatives."""

    no_reverse_mode = _NO_SECOND
    no_forward_mode = _NO_FORWARD_MODE


class _Dispatched(_Gradients):
    """The results of a forward that went through the dispatcher."""

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Any) -> None:
        super().setup_context(ctx, inputs, output)
        _, ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        needed = ctx.needs_input_grad
        if grad_out is None and grad_lse is None:
            return (None,) * len(needed)
        wanted = Wanted(needed[_BIAS], needed[_SINKS])
        given = grad_out, grad_lse
        q, k, v, *others = _gradients_of(given, ctx.saved_tensors, ctx.options, wanted)
        return (
            None,
            None,
            q if needed[_Q] else None,
            k if needed[_K] else None,
            v if needed[_V] else None,
            *others,
            *_OF_OTHERS,
        )


def _gradients_of(
    given: tuple[torch.Tensor | None, torch.Tensor | None],
    saved: tuple[torch.Tensor | None, ...],
    options: tuple[Any, ...],
    wanted: Wanted,
) -> Sequence[torch.Tensor | None]:
    """The gradients of a backward, without the dispatcher where it may be skipped.

    None for the bias and the sinks unless they are wanted.
    """
    grads: Sequence[torch.Tensor | None]
    known = None if is_compiling() else plans.known_backward(given, saved, options, wanted)
    if known is None:
        # Hooks of saved tensors may have changed the order of their memory.
        saved = (*map(rows_contiguous, saved[:-_RESULTS]), *saved[-_RESULTS:])
    inputs, (out, lse) = inputs_of(saved[:-_RESULTS]), saved[-_RESULTS:]
    if known is not None:
        grads = recorded(BACKWARD, known.run)(inputs, out, lse, *given)
    elif skips_dispatcher(*given, *saved):
        options = Options._make(options)
        grads = recorded(BACKWARD, plans.backward)(*given, inputs, out, lse, options, wanted)
        plans.remember_backward(given, saved, options, wanted)
    else:
        backward = torch.ops.flashvar.attention_bwd.default
        q, k, v, *others = backward(*given, out, lse, *wanted, *inputs, *options)
        pairs = zip(others, wanted, strict=True)
        grads = (q, k, v, *[one if is_wanted else None for one, is_wanted in pairs])
    return grads


_apply: Final = plain_apply(_Attention)


def differentiable(
    plan: Plan, given: tuple[torch.Tensor | None, ...], with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, with `with_lse`, the log-sum-exp of plain tensors, recorded by autograd.

    `given` are the fields of Inputs, or q, k and v alone.
    """
    if len(given) > _SLOPES:
        refuse_gradient_of_slopes(given)
    outputs = _apply(plan, with_lse, *given)
    if not with_lse:
        return outputs, None
    out, lse = outputs
    return out, lse


def forward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of attention_fwd."""
    inputs, options = arguments[:_TENSORS], arguments[_TENSORS:]
    # Calls that need no gradients, as those of compiled graphs, go straight to a plan.
    if nothing_intercepts(*inputs):
        recent = plans.known(inputs, options)
        # Not of meta tensors: no backend runs them, and a plan asks the one that was named.
        if recent is None and not inputs[0].is_meta and _is_plain(inputs):
            found = plans.plan_of(inputs, options)
            results = found.run(inputs, True)
            plans.remember(inputs, options, found)
            return results
        if recent is not None and not recent[1]:
            return recent[0].run(inputs, True)
    refuse_gradient_of_slopes(inputs)
    op = torch.ops.flashvar.attention_fwd.default
    results = below_autograd(op, run.forward, keyset, arguments)
    if not may_be_differentiated(*inputs):
        return results
    return attach(_Dispatched, results, options, *inputs)


def _is_plain(inputs: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether inputs are plain tensors of a call that autograd does not record."""
    given = [x for x in inputs if x is not None]
    records = torch.is_grad_enabled() and torch._C._any_requires_grad(*given)
    return not records and are_plain(*given)


def backward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of attention_bwd."""
    grad_out, grad_lse, out, lse, *rest = arguments
    given, wanted = (grad_out, grad_lse), Wanted(*rest[:2])
    inputs, options = run.split(tuple(rest[2:]))
    saved = *inputs, out, lse
    # As in the forward.
    if nothing_intercepts(*given, *saved):
        known = plans.known_backward(given, saved, options, wanted)
        if known is not None:
            return run.of_schema(known.run(inputs, out, lse, *given), lse)
        if skips_dispatcher(*given, *saved):
            results = run.backward(*arguments)
            plans.remember_backward(given, saved, options, wanted)
            return results
    op = torch.ops.flashvar.attention_bwd.default
    results = below_autograd(op, run.backward, keyset, arguments)
    if not may_be_differentiated(*arguments):
        return results
    return attach(_Gradients, results, *arguments)


def refuse_gradient_of_slopes(inputs: tuple[Any, ...]) -> None:
    """Refuse slopes that require a gradient: attention computes none for them."""
    slopes = inputs[_SLOPES]
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError(
            "alibi_slopes must not require a gradient, attention computes none: detach() "
            "them, or pass the biases themselves as bias"
        )
