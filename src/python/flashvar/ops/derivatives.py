"""Derivatives of ops at any depth of transforms, and the refusal of derivatives an op has not.

The op `no_derivative` refuses, not a line of Python: tracing a program also traces derivatives that
may never be computed. The op is then part of the graph and raises where it runs. While it is
traced, its result has the shape and dtype of the derivative.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from flashvar.errors import BackendUnavailableError

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_LIBRARY.define(
    "no_derivative(Tensor cause, SymInt[] shape, ScalarType dtype, str refusal) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Differentiated(_SingleLevelFunction):  # type: ignore[misc]
    """Results that were computed below autograd; subclasses define their derivatives.

    The dispatcher calls it once for each level of transforms, so it handles one level.
    """

    @staticmethod
    def forward(results: Any, *inputs: Any) -> Any:
        """The results themselves; the inputs give them their history."""
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep what `refuse` needs."""
        ctx.set_materialize_grads(False)
        ctx.inputs = likenesses(inputs)
        ctx.outputs = likenesses(output)

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        return (ctx._autograd_function_id,)


def below_autograd(op: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    """The result of an op at the next level of transforms, or of its kernel.

    Not in the forward of a Function, where autograd is switched off for those levels too.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def attach(function: type[Differentiated], results: tuple[Any, ...], *inputs: Any) -> Any:
    """The results with the derivatives that a function defines."""
    with enable_single_level_autograd_function():
        return function.apply(results, *inputs)


def may_be_differentiated(*inputs: Any) -> bool:
    """Whether autograd must record results; only `apply` knows of tangents."""
    if torch._C._is_fwd_grad_enabled():
        return True
    return torch.is_grad_enabled() and bool(torch._C._any_requires_grad(*inputs))


def likenesses(values: Any) -> list[Any]:
    """Shape and dtype of each tensor, all that a refused derivative needs; None for the others."""
    return [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else None for x in values]


def refuse_second(ctx: Any, grads: Any, refusal: str) -> tuple[Any, ...]:
    """The backward of a Differentiated that has none."""
    return _refuse(ctx.inputs, ctx.needs_input_grad, grads, refusal)


def refuse_forward_mode(ctx: Any, tangents: Any, refusal: str) -> tuple[Any, ...]:
    """The jvp of a Differentiated that has none."""
    return _refuse(ctx.outputs, (True,) * len(ctx.outputs), tangents, refusal)


def _refuse(like: Any, wanted: Any, causes: Any, refusal: str) -> tuple[Any, ...]:
    """Calls of no_derivative, which depend on a cause: no graph computes them before it."""
    cause = next((x for x in causes if x is not None), None)
    if cause is None:
        return (None,) * len(like)
    op = torch.ops.flashvar.no_derivative.default
    return tuple(
        op(cause, *one, refusal) if want and one is not None else None
        for one, want in zip(like, wanted, strict=True)
    )


class _NoDerivative(Differentiated):
    """The result of no_derivative, whose derivatives are refused too."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Differentiated.setup_context(ctx, inputs, output)
        ctx.refusal = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return refuse_second(ctx, grads, ctx.refusal)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return refuse_forward_mode(ctx, tangents, ctx.refusal)


def _raise(cause: Any, shape: Any, dtype: Any, refusal: str) -> torch.Tensor:
    raise BackendUnavailableError(refusal)


def _fake(cause: Any, shape: Any, dtype: Any, refusal: str) -> torch.Tensor:
    like: torch.Tensor = cause.new_empty(shape, dtype=dtype)
    return like


def _batched(
    info: Any, in_dims: Any, cause: Any, shape: Any, dtype: Any, refusal: str
) -> tuple[torch.Tensor, int]:
    shape = (info.batch_size, *shape)
    return torch.ops.flashvar.no_derivative.default(cause, shape, dtype, refusal), 0


def _at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    result = below_autograd(torch.ops.flashvar.no_derivative.default, keyset, arguments)
    if not may_be_differentiated(*arguments):
        return result
    return attach(_NoDerivative, (result,), *arguments)[0]


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("no_derivative", _raise, _key)
_LIBRARY.impl("no_derivative", _at_autograd_key, "Autograd", with_keyset=True)
torch.library.register_fake("flashvar::no_derivative", _fake, lib=_LIBRARY)
torch.library.register_vmap("flashvar::no_derivative", _batched, lib=_LIBRARY)
