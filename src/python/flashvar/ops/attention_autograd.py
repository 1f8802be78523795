"""The derivative of attention: what is kept of a forward, and who is asked for the gradients.

Two ways lead here. The Autograd key of the op, for everything that is traced or transformed, and
`differentiable`, which plain tensors take: it spares them the dispatcher.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function

from flashvar.errors import BackendUnavailableError, InvalidInputError
from flashvar.ops.attention_plan import NO_EXTRAS, Extras, Plan
from flashvar.ops.attention_problem import Inputs

_TENSORS: Final = len(Inputs._fields)
_SLOPES: Final = Inputs._fields.index("alibi_slopes")


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """A forward that somebody else computes, and the op that differentiates it.

    `inputs` are those of Inputs, of which the last may be left out.
    """

    @staticmethod
    def forward(ctx: Any, compute: Any, options: Any, *inputs: Any) -> Any:
        out, lse = compute(inputs, options)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.options = options
        # An output that nothing used has gradient None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        wanted = ctx.needs_input_grad
        if grad_out is None and grad_lse is None:
            return (None,) * len(wanted)
        *inputs, out, lse = ctx.saved_tensors
        absent = (None,) * (_TENSORS - len(inputs))
        grads = torch.ops.flashvar.attention_bwd.default(
            grad_out, grad_lse, out, lse, any(wanted[5:6]), *inputs, *absent, *ctx.options
        )
        grads = (None, None, *grads, *(None,) * len(wanted))
        return tuple(grad if want else None for grad, want in zip(grads, wanted, strict=False))


class _Twice(torch.autograd.Function):  # type: ignore[misc]
    """A backward whose own derivative is refused."""

    @staticmethod
    def forward(ctx: Any, compute: Any, *arguments: Any) -> Any:
        return compute(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise BackendUnavailableError(
            "flashvar.attention has first derivatives only, got a request for the second (a "
            "backward through create_graph=True): use "
            "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH there"
        )


# What `Function.apply` does beside this is for functorch, which plain tensors know nothing of.
_apply: Final = torch._C._FunctionBase.__dict__["apply"].__get__(None, _Attention)


def differentiable(
    plan: Plan,
    tensors: tuple[torch.Tensor | None, ...],
    extras: Extras,
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and log-sum-exp of plain tensors, with their history."""
    if extras is not NO_EXTRAS:
        tensors = (*tensors, *extras)
        refuse_gradient_of_slopes(tensors)
    out, lse = _apply(plan.compute, options, *tensors)
    return out, lse


# At the Autograd key functorch (torch.func.grad) has had its turn, and one level is differentiated.
_apply_twice: Final = torch._C._FunctionBase.__dict__["apply"].__get__(None, _Twice)


def forward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of attention_fwd."""
    op = torch.ops.flashvar.attention_fwd.default

    def compute(inputs: Any, options: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs, *options)

    inputs, options = arguments[:_TENSORS], arguments[_TENSORS:]
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
        return compute(inputs, options)
    refuse_gradient_of_slopes(inputs)
    with enable_single_level_autograd_function():
        return _apply(compute, options, *inputs)


def backward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of attention_bwd."""
    op = torch.ops.flashvar.attention_bwd.default

    def compute(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        with enable_single_level_autograd_function():
            return _apply_twice(compute, *arguments)
    return compute(*arguments)


def refuse_gradient_of_slopes(inputs: tuple[Any, ...]) -> None:
    """Slopes are constants."""
    slopes = inputs[_SLOPES]
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError(
            "alibi_slopes must not require a gradient, attention has none for them: detach() "
            "them, or pass the biases themselves as bias"
        )
