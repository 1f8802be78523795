"""The derivative of attention: what is kept of a forward, and who is asked for the gradients.

Two ways lead here. The Autograd key of the op, for everything that is traced or transformed, and
`differentiable`, which plain tensors take: it spares them the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, Final

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function

from flashvar.errors import BackendUnavailableError, InvalidInputError
from flashvar.ops import attention_run
from flashvar.ops.attention_plan import NO_EXTRAS, Extras, Plan
from flashvar.ops.attention_problem import Inputs, Options, make_inputs
from flashvar.ops.attention_watchers import is_compiling, nothing_watches

_TENSORS: Final = len(Inputs._fields)
# Arguments of _Attention before the inputs, and the place of the bias.
_BEFORE: Final = 3
_BIAS: Final = _BEFORE + Inputs._fields.index("bias")
_SLOPES: Final = Inputs._fields.index("alibi_slopes")


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """A forward that somebody else computes, and its gradients.

    `inputs` are those of Inputs, of which the last may be left out.
    """

    @staticmethod
    def forward(ctx: Any, compute: Any, options: Any, with_lse: bool, *inputs: Any) -> Any:
        out, lse = compute(inputs, options)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.options = options
        if not with_lse:
            return out
        # An output that nothing used has gradient None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any = None) -> Any:
        wanted = ctx.needs_input_grad
        if grad_out is None and grad_lse is None:
            return (None,) * len(wanted)
        *inputs, out, lse = ctx.saved_tensors
        inputs = (*inputs, *NO_EXTRAS[len(inputs) - 3 :])
        bias = wanted[_BIAS] if len(wanted) > _BIAS else False
        if (
            not is_compiling()
            and not torch.is_grad_enabled()
            and type(grad_out) is torch.Tensor
            and type(grad_lse) in (torch.Tensor, NoneType)
            and type(out) is torch.Tensor
            and nothing_watches()
        ):
            options = Options._make(ctx.options)
            given = make_inputs(inputs)
            grads: Sequence[torch.Tensor | None] = attention_run.backward(
                grad_out, grad_lse, given, out, lse, options, bias
            )
        else:
            grads = torch.ops.flashvar.attention_bwd.default(
                grad_out, grad_lse, out, lse, bias, *inputs, *ctx.options
            )
        answers = (*(None,) * _BEFORE, *grads, *(None,) * len(wanted))
        return tuple(grad if want else None for grad, want in zip(answers, wanted, strict=False))


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
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, if it is wanted, the log-sum-exp of plain tensors, with their history."""
    if extras is not NO_EXTRAS:
        tensors = (*tensors, *extras)
        refuse_gradient_of_slopes(tensors)
    answer = _apply(plan.compute, options, with_lse, *tensors)
    if not with_lse:
        return answer, None
    out, lse = answer
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
        return _apply(compute, options, True, *inputs)


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
