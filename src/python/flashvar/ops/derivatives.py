"""The derivatives that attention has not: who asks for one is told so, at any depth of transforms.

An op refuses, not a line of Python. What traces a program traces derivatives that are perhaps never
computed; the op is in the graph then, and speaks where it is run. Its result is that of nothing.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from flashvar.errors import BackendUnavailableError

SCHEMA: Final = (
    "no_derivative(Tensor cause, SymInt[] shape, ScalarType dtype, bool forward_mode) -> Tensor"
)

_INSTEAD: Final = "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH there"
_SECOND: Final = (
    "flashvar.attention has first derivatives only, got a request for the second (a backward "
    f"through create_graph=True, torch.func.grad of a gradient, a Hessian): use {_INSTEAD}"
)
_FORWARD: Final = (
    "flashvar.attention has no forward-mode derivative, got an input with a tangent (jvp, jacfwd "
    f"or a dual tensor): use reverse mode, or {_INSTEAD}"
)


class Differentiated(_SingleLevelFunction):  # type: ignore[misc]
    """What was computed below autograd, as results that have no derivatives.

    The dispatcher comes here once for each level of transforms, so one level is all this serves.
    """

    @staticmethod
    def forward(results: Any, *inputs: Any) -> Any:
        """The results themselves; of the inputs they get their history."""
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep what the derivatives need."""
        ctx.set_materialize_grads(False)
        ctx.inputs = likenesses(inputs)
        ctx.outputs = likenesses(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Reverse mode."""
        return _refused(ctx.inputs, ctx.needs_input_grad, grads, forward_mode=False)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward mode."""
        every = (True,) * len(ctx.outputs)
        return _refused(ctx.outputs, every, tangents, forward_mode=True)

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        return (ctx._autograd_function_id,)


def below_autograd(op: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    """What comes of an op at the next level of transforms, or in its kernel.

    Not in the forward of a Function, which has autograd switched off for those levels too.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def attach(function: type[Differentiated], results: tuple[Any, ...], *inputs: Any) -> Any:
    """The results with the derivatives that a function gives them."""
    with enable_single_level_autograd_function():
        return function.apply(results, *inputs)


def may_be_differentiated(*inputs: Any) -> bool:
    """Whether autograd has to know of results; of tangents only `apply` knows."""
    if torch._C._is_fwd_grad_enabled():
        return True
    return torch.is_grad_enabled() and bool(torch._C._any_requires_grad(*inputs))


def no_derivative(cause: Any, shape: Any, dtype: Any, forward_mode: bool) -> torch.Tensor:
    """The op where tensors hold numbers."""
    raise BackendUnavailableError(_FORWARD if forward_mode else _SECOND)


def no_derivative_fake(cause: Any, shape: Any, dtype: Any, forward_mode: bool) -> torch.Tensor:
    """The op where only the graph is wanted."""
    like: torch.Tensor = cause.new_empty(shape, dtype=dtype)
    return like


def no_derivative_batched(
    info: Any, in_dims: Any, cause: Any, shape: Any, dtype: Any, forward_mode: bool
) -> tuple[torch.Tensor, int]:
    """The batching rule of the op."""
    shape = (info.batch_size, *shape)
    return torch.ops.flashvar.no_derivative.default(cause, shape, dtype, forward_mode), 0


def no_derivative_at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    """The Autograd kernel of the op, whose derivatives are refused too."""
    result = below_autograd(torch.ops.flashvar.no_derivative.default, keyset, arguments)
    if not may_be_differentiated(*arguments):
        return result
    return attach(Differentiated, (result,), *arguments)[0]


def likenesses(values: Any) -> list[Any]:
    """Shape and dtype of each tensor, which is all that a refused derivative has of one."""
    return [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else None for x in values]


def _refused(like: Any, wanted: Any, causes: Any, *, forward_mode: bool) -> tuple[Any, ...]:
    """What stands for derivatives; each hangs on a cause, so that no graph asks before that."""
    cause = next((x for x in causes if x is not None), None)
    if cause is None:
        return (None,) * len(like)
    op = torch.ops.flashvar.no_derivative.default
    return tuple(
        op(cause, *one, forward_mode) if want and one is not None else None
        for one, want in zip(like, wanted, strict=True)
    )
