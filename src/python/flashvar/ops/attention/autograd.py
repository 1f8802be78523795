"""The derivative of attention: what is kept of a forward, and who is asked for the gradients.

Two ways lead here. The Autograd key of the op, for everything that is traced or transformed, and
`differentiable`, which plain tensors take: it spares them the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, Final

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.attention import plan as plans
from flashvar.ops.attention.plan import Plan
from flashvar.ops.attention.problem import NO_TENSORS, Inputs, OptionalTensors, Options, make_inputs
from flashvar.ops.derivatives import (
    Differentiated,
    attach,
    below_autograd,
    likenesses,
    may_be_differentiated,
)
from flashvar.ops.dispatch_modes import is_compiling, nothing_watches

_TENSORS: Final = len(Inputs._fields)
# Arguments of _Attention before the inputs.
_BEFORE: Final = 3
_BIAS: Final = Inputs._fields.index("bias")
_SLOPES: Final = Inputs._fields.index("alibi_slopes")


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The forward of plain tensors, and its gradients.

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
        return _gradients(ctx, _BEFORE, grad_out, grad_lse)


class _Dispatched(Differentiated):
    """The gradients of a forward that came through the dispatcher."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)
        ctx.outputs = likenesses(output)

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        return _gradients(ctx, 2, grad_out, grad_lse)


def _gradients(ctx: Any, before: int, grad_out: Any, grad_lse: Any) -> Any:
    """One gradient for each argument of a forward whose inputs come after some others."""
    wanted = ctx.needs_input_grad
    if grad_out is None and grad_lse is None:
        return (None,) * len(wanted)
    *inputs, out, lse = ctx.saved_tensors
    inputs = (*inputs, *NO_TENSORS[len(inputs) - 3 :])
    bias = wanted[before + _BIAS] if len(wanted) > before + _BIAS else False
    if (
        not is_compiling()
        and not torch.is_grad_enabled()
        and type(grad_out) is torch.Tensor
        and type(grad_lse) in (torch.Tensor, NoneType)
        and type(out) is torch.Tensor
        and nothing_watches()
        and _in_memory(out, grad_out, grad_lse)
    ):
        options = Options._make(ctx.options)
        given = make_inputs(inputs)
        grads: Sequence[torch.Tensor | None] = plans.backward(
            grad_out, grad_lse, given, out, lse, options, bias
        )
    else:
        grads = torch.ops.flashvar.attention_bwd.default(
            grad_out, grad_lse, out, lse, bias, *inputs, *ctx.options
        )
    answers = (*(None,) * before, *grads, *(None,) * len(wanted))
    return tuple(grad if want else None for grad, want in zip(answers, wanted, strict=False))


def _in_memory(out: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None) -> bool:
    """Whether tensors are more than wrappers, as torch's own of a batch or of a past transform."""
    try:
        out.data_ptr()
        grad_out.data_ptr()
        if grad_lse is not None:
            grad_lse.data_ptr()
    except RuntimeError:
        return False
    return True


# What `Function.apply` does beside this is for functorch, which plain tensors know nothing of.
_apply: Final = torch._C._FunctionBase.__dict__["apply"].__get__(None, _Attention)


def differentiable(
    plan: Plan,
    tensors: tuple[torch.Tensor | None, ...],
    optional: OptionalTensors,
    options: tuple[Any, ...],
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, if it is wanted, the log-sum-exp of plain tensors, with their history."""
    if optional is not NO_TENSORS:
        tensors = (*tensors, *optional)
        refuse_gradient_of_slopes(tensors)
    answer = _apply(plan.compute, options, with_lse, *tensors)
    if not with_lse:
        return answer, None
    out, lse = answer
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
    return attach(Differentiated, results, *arguments)


def refuse_gradient_of_slopes(inputs: tuple[Any, ...]) -> None:
    """Slopes are constants."""
    slopes = inputs[_SLOPES]
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError(
            "alibi_slopes must not require a gradient, attention has none for them: detach() "
            "them, or pass the biases themselves as bias"
        )
