"""The derivatives of causal_conv1d, at any depth of transforms.

First derivatives in reverse mode are kernels. Those of higher order and of forward mode are torch's
own, of the reference's formula. An update has none.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.backends.reference.causal_conv1d import formula
from flashvar.errors import InvalidInputError
from flashvar.ops.causal_conv1d import run
from flashvar.ops.causal_conv1d.inputs import (
    check,
    convolution,
    in_order_of,
    rows_first,
    users_order,
)
from flashvar.ops.causal_conv1d.spec import BACKWARD, FORWARD
from flashvar.ops.derivatives import (
    Differentiated,
    Refused,
    attach,
    below_autograd,
    has_tangent,
    may_be_differentiated,
    plain_apply,
    skips_dispatcher,
)
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.ops.profiling import recorded


class _Plain(torch.autograd.Function):  # type: ignore[misc]
    """The forward of plain tensors, and its gradients."""

    @staticmethod
    def forward(ctx: Any, plan: run.Plan, *tensors: Any) -> Any:
        _keep(ctx, plan.options, *tensors)
        return plan.run(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_y: Any, grad_final: Any) -> Any:
        return (None, *_gradients(ctx, ctx.needs_input_grad[1:], grad_y, grad_final))


class _Dispatched(Differentiated):
    """The gradients of a forward: `inputs` are its results, the options, then the tensors."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad_y: Any, grad_final: Any) -> Any:
        return (None, None, *_gradients(ctx, ctx.needs_input_grad[2:], grad_y, grad_final))


def _keep(
    ctx: Any, options: Any, x: Any, weight: Any, bias: Any, residual: Any, state: Any, ends: Any
) -> None:
    ctx.options = options
    ctx.save_for_backward(x, weight, bias, state, ends)
    ctx.residual = None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, wanted: tuple[bool, ...], grad_y: Any, grad_final: Any) -> tuple[Any, ...]:
    """The wanted gradients of the tensors of a forward."""
    if grad_y is None and grad_final is None:
        return (None,) * len(wanted)
    silu, _, layout, backend = ctx.options
    of_residual = None
    if wanted[3] and grad_y is not None:
        of_residual = grad_y.to(ctx.residual)
    if wanted[0] or wanted[1] or wanted[2] or wanted[4]:
        given = (grad_y, grad_final, *ctx.saved_tensors)
        options = (silu, layout, backend)
        plan = None if is_compiling() else run.known_backward(given, options)
        found: Any
        if plan is not None:
            found = recorded(BACKWARD, plan.run)(*given)
        elif skips_dispatcher(*given):
            found = recorded(BACKWARD, run.gradients)(given, options)
        else:
            found = torch.ops.flashvar.causal_conv1d_bwd.default(*given, *options)
        of_x, of_weight, of_bias, of_state = found
    else:
        of_x = of_weight = of_bias = of_state = None
    found = (of_x, of_weight, of_bias, of_residual, of_state, None)
    return tuple(g if want else None for g, want in zip(found, wanted, strict=True))


class _Updated(Refused):
    """The results of an update, which have no derivatives."""

    no_reverse_mode = (
        "causal_conv1d_update has no derivatives, found a request for a gradient: use "
        "causal_conv1d with initial_state, which has them"
    )
    no_forward_mode = (
        "causal_conv1d_update has no derivatives, found an input with a tangent: use "
        "causal_conv1d with initial_state, which has them"
    )
    written = (2,)  # state


_apply: Final = plain_apply(_Plain)


def forward_of_plain(
    plan: run.Plan, records: bool, tensors: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A forward of plain tensors that nothing intercepts; `records` is whether autograd does."""
    if records:
        y, final_state = recorded(FORWARD, _apply)(plan, *tensors)
    else:
        y, final_state = recorded(FORWARD, plan.run)(*tensors)
    return y, final_state


def forward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of causal_conv1d_fwd."""
    tensors, options = arguments[:6], arguments[6:]
    given = [x for x in tensors if x is not None]
    if has_tangent(*given):
        return _forward_formula(*arguments)
    op = torch.ops.flashvar.causal_conv1d_fwd.default
    results = below_autograd(op, run.forward, keyset, arguments)
    if not (torch.is_grad_enabled() and may_be_differentiated(*given)):
        return results
    return attach(_Dispatched, results, options, *tensors)


def backward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of causal_conv1d_bwd."""
    tensors = [x for x in arguments[:7] if x is not None]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if wanted or has_tangent(*tensors):
        return backward_formula(*arguments)
    op = torch.ops.flashvar.causal_conv1d_bwd.default
    return below_autograd(op, run.backward, keyset, arguments)


def update_at_autograd_key(keyset: Any, x: Any, state: Any, *others: Any) -> Any:
    """The Autograd kernel of causal_conv1d_update."""
    if torch.is_grad_enabled() and state.requires_grad:
        raise InvalidInputError(
            "state must not require a gradient to be written in place, found one that does: detach "
            "it, or use causal_conv1d with initial_state"
        )
    op = torch.ops.flashvar.causal_conv1d_update.default
    y = below_autograd(op, run.update, keyset, (x, state, *others))
    given = [one for one in (x, state, *others[:3]) if one is not None]
    if not may_be_differentiated(*given):
        return y
    return attach(_Updated, (y,), *given)[0]


def _forward_formula(
    x: Any, weight: Any, bias: Any, residual: Any, state: Any, cu_seqlens: Any, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    silu, columns, layout, _ = options
    check(x, weight, bias, residual, state, cu_seqlens, layout)
    conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
    of_residual = None if residual is None else rows_first(residual, layout)
    y, final_state = formula.forward(conv, of_residual, columns)
    return in_order_of(x, users_order(y, x, layout)), final_state.contiguous()


def backward_formula(
    grad_y: Any, grad_final: Any, x: Any, weight: Any, bias: Any, state: Any, cu_seqlens: Any,
    silu: bool, layout: str, _backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The backward in torch's own functions."""
    check(x, weight, bias, None, state, cu_seqlens, layout)
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
    of_x, of_weight, of_bias, of_state = formula.backward(
        conv, rows_first(grad_y, layout), grad_final
    )
    return (
        in_order_of(x, users_order(of_x, x, layout)),
        of_weight,
        x.new_empty(0) if bias is None else of_bias,
        x.new_empty(0) if state is None else of_state.contiguous(),
    )
