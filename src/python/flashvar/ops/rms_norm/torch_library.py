"""Registers the norms with torch: an op, its backward, and their derivatives.

Plain tensors of a device take the kernels. The formula computes all others: the CPU, transforms of
torch.func, forward mode, tensor subclasses, float64, and rows that are too long for a block. It
also computes derivatives of higher order.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch.autograd import forward_ad

from flashvar.ops.derivatives import (
    Differentiated,
    attach,
    below_autograd,
    has_tangent,
    may_be_differentiated,
    plain_apply,
    skips_dispatcher,
)
from flashvar.ops.dispatch_modes import PLAIN, are_plain, is_compiling, no_dispatch_mode_active
from flashvar.ops.profiling import recorded
from flashvar.ops.rms_norm import formula, run
from flashvar.ops.rms_norm.checks import check
from flashvar.ops.rms_norm.formula import Gradients, Norm, Tensors

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)
_FORWARD: Final = "rms_norm"
_BACKWARD: Final = "rms_norm_bwd"
_ARGUMENTS: Final = (
    "Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? residual, "
    "float eps, bool mean, bool sigmoid, ScalarType dtype, ScalarType? total_dtype"
)
# The sum has no elements where it is not wanted.
_LIBRARY.define(f"{_FORWARD}({_ARGUMENTS}) -> (Tensor y, Tensor total)", tags=_TAGS)
# Of a tensor that is absent the gradient has no elements, nor has that of a residual with the dtype
# of x: it is that of x.
_LIBRARY.define(
    f"{_BACKWARD}(Tensor grad_y, Tensor? grad_total, {_ARGUMENTS}) -> (Tensor grad_x, "
    "Tensor grad_gate, Tensor grad_weight, Tensor grad_bias, Tensor grad_residual)",
    tags=_TAGS,
)
_OP: Final = torch.ops.flashvar.rms_norm.default
_BACKWARD_OP: Final = torch.ops.flashvar.rms_norm_bwd.default

_TRITON: Final = find_spec("triton") is not None
_IN_TRITON: Final = (torch.bfloat16, torch.float16, torch.float32)
_MOST_DIM: Final = 8192
_COUNT: Final = len(Tensors._fields)
_transforms: Final = torch._C._functorch.peek_interpreter_stack


def normalize(
    given: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norm of x plus the residual, and that sum if it is wanted.

    `given` are the fields of Tensors, `options` those of Norm.
    """
    known = None if is_compiling() else run.known(given, options)
    if known is not None:
        return _forward_of_plain(*known, given)
    # Dynamo of torch 2.8 does not follow _make().
    tensors, norm = Tensors(*given), Norm(*options)
    present = [x for x in tensors if x is not None]
    if not _kernels_run(tensors, norm, present):
        check(tensors, norm)
        return formula.forward(tensors, norm)
    if is_compiling() or not no_dispatch_mode_active():
        y, total = _OP(*tensors, *norm)
        return y, None if norm.total_dtype is None else total
    plan = run.plan(tensors, norm)
    records = torch.is_grad_enabled() and torch._C._any_requires_grad(*present)
    found = _forward_of_plain(plan, records, tensors)
    run.remember(tensors, norm, plan)
    return found


def _forward_of_plain(
    plan: run.Plan, records: bool, tensors: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A forward of plain tensors that nothing intercepts; `records` is whether autograd does."""
    if records:
        y, total = recorded(_FORWARD, _apply)(plan, *tensors)
    else:
        y, total = recorded(_FORWARD, plan.run)(*tensors)
    return y, total


def _kernels_run(tensors: Tensors, norm: Norm, given: list[torch.Tensor]) -> bool:
    x, gate, weight, bias, residual = tensors
    if not _in_triton(x) or norm.dtype not in _IN_TRITON:
        return False
    shape, device = x.shape, x.device
    for one in given:
        if one.dtype not in _IN_TRITON or one.device != device:
            return False
    for one in (gate, residual):
        if one is not None and one.shape != shape:
            return False
    for one in (weight, bias):
        if one is not None and one.shape != shape[-1:]:
            return False
    if is_compiling():
        if torch._C._are_functorch_transforms_active():
            return False
        return all(type(one) in PLAIN for one in given)
    return are_plain(*given) and _transforms() is None and forward_ad._current_level < 0


def _in_triton(x: torch.Tensor) -> bool:
    return _TRITON and x.is_cuda and x.dim() > 0 and 0 < x.shape[-1] <= _MOST_DIM


def _forward(tensors: Tensors, norm: Norm) -> tuple[torch.Tensor, torch.Tensor | None]:
    if _in_triton(tensors.x):
        return run.plan(tensors, norm).run(*tensors)
    return formula.forward(tensors, norm)


def _backward(
    grad_y: Any, grad_total: Any, tensors: Tensors, norm: Norm, wanted: run.Wanted = run.ALL
) -> Gradients:
    if _in_triton(tensors.x):
        return Gradients._make(run.gradients((grad_y, grad_total, *tensors), norm, wanted))
    return formula.backward(grad_y, grad_total, tensors, norm)


def _split(arguments: tuple[Any, ...]) -> tuple[Tensors, Norm]:
    return Tensors._make(arguments[:_COUNT]), Norm._make(arguments[_COUNT:])


def _results(x: torch.Tensor, found: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    y, total = found
    return y.contiguous(), x.new_empty(0) if total is None else total.contiguous()


def _gradients(tensors: Tensors, found: Gradients) -> tuple[torch.Tensor, ...]:
    """Those that the op gives."""
    x, residual = tensors.x, tensors.residual
    if residual is not None and residual.dtype == x.dtype:
        found = found._replace(residual=None)
    return tuple(x.new_empty(0) if one is None else one.contiguous() for one in found)


def _forward_op(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(arguments[0], _forward(*_split(arguments)))


def _backward_op(grad_y: Any, grad_total: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, norm = _split(arguments)
    return _gradients(tensors, _backward(grad_y, grad_total, tensors, norm))


def _forward_formula(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(arguments[0], formula.forward(*_split(arguments)))


def _backward_formula(grad_y: Any, grad_total: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, norm = _split(arguments)
    return _gradients(tensors, formula.backward(grad_y, grad_total, tensors, norm))


def _forward_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (x, *_), norm = _split(arguments)
    y = torch.empty(x.shape, dtype=norm.dtype, device=x.device)
    if norm.total_dtype is None:
        return y, x.new_empty(0)
    return y, torch.empty(x.shape, dtype=norm.total_dtype, device=x.device)


def _backward_fake(grad_y: Any, grad_total: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, _ = _split(arguments)
    like = [None if x is None else x.new_empty(x.shape) for x in tensors]
    return _gradients(tensors, Gradients._make(like))


def _keep(ctx: Any, norm: Norm, *tensors: Any) -> None:
    ctx.norm = norm
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients_of(ctx: Any, wanted: run.Wanted, grad_y: Any, grad_total: Any) -> Sequence[Any]:
    """Those of the tensors of a forward that are wanted, and others that are made anyway."""
    tensors, norm = ctx.saved_tensors, ctx.norm
    if norm.total_dtype is None:
        grad_total = None
    if grad_y is None and grad_total is None:
        return (None,) * _COUNT
    if grad_y is None:
        grad_y = torch.zeros_like(tensors[0], dtype=norm.dtype)
    given = (grad_y, grad_total, *tensors)
    plan = None if is_compiling() else run.known_backward(given, norm, wanted)
    if plan is not None:
        grads: Sequence[Any] = recorded(_BACKWARD, plan.run)(*given)
        return grads
    tensors = Tensors._make(tensors)
    if skips_dispatcher(*given):
        grads = recorded(_BACKWARD, _backward)(grad_y, grad_total, tensors, norm, wanted)
        return grads
    found = _BACKWARD_OP(*given, *norm)
    grads = [None if x is None else grad for x, grad in zip(tensors, found, strict=True)]
    residual = tensors.residual
    if residual is not None and residual.dtype == tensors.x.dtype:
        grads[-1] = grads[0]
    return grads


class _Plain(torch.autograd.Function):  # type: ignore[misc]
    """The norm of plain tensors that nothing in torch intercepts."""

    @staticmethod
    def forward(ctx: Any, plan: run.Plan, *tensors: Any) -> Any:
        _keep(ctx, plan.norm, *tensors)
        return plan.run(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_y: Any, grad_total: Any) -> Any:
        return (None, *_gradients_of(ctx, ctx.needs_input_grad[1:], grad_y, grad_total))


class _Dispatched(Differentiated):
    """The gradients of the op: `inputs` are its results, the options, then the tensors."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad_y: Any, grad_total: Any) -> Any:
        return (None, None, *_gradients_of(ctx, ctx.needs_input_grad[2:], grad_y, grad_total))


_apply: Final = plain_apply(_Plain)


def _forward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    tensors, norm = _split(arguments)
    given = [x for x in tensors if x is not None]
    if has_tangent(*given):
        return _forward_formula(*arguments)
    results = below_autograd(_OP, _forward_op, keyset, arguments)
    if not (torch.is_grad_enabled() and may_be_differentiated(*given)):
        return results
    return attach(_Dispatched, results, norm, *tensors)


def _backward_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    given = [x for x in arguments if isinstance(x, torch.Tensor)]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if recorded or has_tangent(*given):
        return _backward_formula(*arguments)
    return below_autograd(_BACKWARD_OP, _backward_op, keyset, arguments)


def _batched(op: Any) -> Any:
    """The rule of an op under vmap: one sample after another."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        samples = [
            op(
                *(
                    x if dim is None else x.select(dim, sample)
                    for x, dim in zip(arguments, in_dims, strict=True)
                )
            )
            for sample in range(info.batch_size)
        ]
        results = tuple(torch.stack(some) for some in zip(*samples, strict=True))
        return results, (0,) * len(results)

    return rule


_LIBRARY.impl(_FORWARD, _forward_op, "CompositeExplicitAutograd")
_LIBRARY.impl(_BACKWARD, _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake(f"flashvar::{_FORWARD}", _forward_fake, lib=_LIBRARY)
torch.library.register_fake(f"flashvar::{_BACKWARD}", _backward_fake, lib=_LIBRARY)
_LIBRARY.impl(_FORWARD, _forward_at_autograd_key, "Autograd", with_keyset=True)
_LIBRARY.impl(_BACKWARD, _backward_at_autograd_key, "Autograd", with_keyset=True)
torch.library.register_vmap(f"flashvar::{_FORWARD}", _batched(_OP), lib=_LIBRARY)
torch.library.register_vmap(f"flashvar::{_BACKWARD}", _batched(_BACKWARD_OP), lib=_LIBRARY)
