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
from flashvar.ops.attention.plan import Plan
from flashvar.ops.attention.problem import NO_TENSORS, Inputs, OptionalTensors, Options, Wanted
from flashvar.ops.attention.spec import BACKWARD
from flashvar.ops.derivatives import (
    Refused,
    attach,
    below_autograd,
    may_be_differentiated,
    plain_apply,
    skips_dispatcher,
)
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.ops.profiling import recorded

_TENSORS: Final = len(Inputs._fields)
# Arguments of _Attention before the inputs.
_BEFORE: Final = 3
_BIAS: Final = Inputs._fields.index("bias")
_SINKS: Final = Inputs._fields.index("sinks")
_NOTHING_MORE: Final = Wanted()
_SLOPES: Final = Inputs._fields.index("alibi_slopes")

_INSTEAD: Final = "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH there"
_NO_SECOND: Final = (
    "flashvar.attention has first derivatives only, got a request for the second (a backward "
    f"through create_graph=True, torch.func.grad of a gradient, a Hessian): use {_INSTEAD}"
)
_NO_FORWARD_MODE: Final = (
    "flashvar.attention has no forward-mode derivative, got an input with a tangent (jvp, jacfwd "
    f"or a dual tensor): use reverse mode, or {_INSTEAD}"
)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The forward of plain tensors, and its gradients.

    `inputs` are the fields of Inputs; trailing optional tensors may be left out.
    """

    @staticmethod
    def forward(ctx: Any, compute: Any, options: Any, with_lse: bool, *inputs: Any) -> Any:
        out, lse = compute(inputs, options)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.options = options
        if not with_lse:
            return out
        # The gradient of an unused output is None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any = None) -> Any:
        return _gradients(ctx, _BEFORE, grad_out, grad_lse)


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
        return _gradients(ctx, 2, grad_out, grad_lse)


def _gradients(ctx: Any, before: int, grad_out: Any, grad_lse: Any) -> Any:
    """One gradient for each argument of a forward; `before` arguments precede the inputs."""
    needed = ctx.needs_input_grad
    if grad_out is None and grad_lse is None:
        return (None,) * len(needed)
    saved = ctx.saved_tensors
    wanted = _NOTHING_MORE
    if len(needed) > before + _SINKS:
        wanted = Wanted(needed[before + _BIAS], needed[before + _SINKS])
    grads = _gradients_of((grad_out, grad_lse), saved, ctx.options, wanted)
    found: list[torch.Tensor | None] = [None] * len(needed)
    # A forward may have left out bias and sinks, whose gradients are the last.
    for place, wanted in enumerate(needed[before : before + len(grads)]):
        if wanted:
            found[before + place] = grads[place]
    return tuple(found)


def _gradients_of(
    given: tuple[torch.Tensor | None, torch.Tensor | None],
    saved: tuple[torch.Tensor | None, ...],
    options: tuple[Any, ...],
    wanted: Wanted,
) -> Sequence[torch.Tensor | None]:
    """The gradients of a backward, without the dispatcher where it may be skipped."""
    out, lse = saved[-2:]
    grads: Sequence[torch.Tensor | None]
    known = None
    if not is_compiling() and not torch.is_grad_enabled():
        known = plans.known_backward(given, saved, options, wanted)
    if known is not None:
        grads = recorded(BACKWARD, known.run, plans.saved_inputs(saved), out, lse, *given)
    elif skips_dispatcher(*given, *saved):
        options = Options._make(options)
        arguments = (*given, plans.saved_inputs(saved), out, lse, options, wanted)
        grads = recorded(BACKWARD, plans.backward, *arguments)
        plans.remember_backward(given, saved, options, wanted)
    else:
        backward = torch.ops.flashvar.attention_bwd.default
        grads = backward(*given, out, lse, *wanted, *plans.saved_inputs(saved), *options)
    return grads


_apply: Final = plain_apply(_Attention)


def differentiable(
    plan: Plan,
    tensors: tuple[torch.Tensor | None, ...],
    optional: OptionalTensors,
    options: tuple[Any, ...],
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, with `with_lse`, the log-sum-exp of plain tensors, recorded by autograd."""
    if optional is not NO_TENSORS:
        tensors = (*tensors, *optional)
        refuse_gradient_of_slopes(tensors)
    outputs = _apply(plan.compute, options, with_lse, *tensors)
    if not with_lse:
        return outputs, None
    out, lse = outputs
    return out, lse


def forward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of attention_fwd."""
    inputs, options = arguments[:_TENSORS], arguments[_TENSORS:]
    refuse_gradient_of_slopes(inputs)
    results = below_autograd(torch.ops.flashvar.attention_fwd.default, keyset, arguments)
    if not may_be_differentiated(*inputs):
        return results
    return attach(_Dispatched, results, options, *inputs)


def backward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of attention_bwd."""
    results = below_autograd(torch.ops.flashvar.attention_bwd.default, keyset, arguments)
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
