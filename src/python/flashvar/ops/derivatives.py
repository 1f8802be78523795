"""Derivatives of ops at any depth of transforms; refusal of those that an op does not have.

The op `no_derivative` refuses, not a line of Python: tracing a program also traces derivatives that
may never be computed. The op is then part of the graph and raises where it runs. While it is
traced, its result has the shape and dtype of the derivative, and depends on all that the derivative
would depend on: else derivatives of the result would be zeros, and the op would leave the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from flashvar.errors import BackendUnavailableError
from flashvar.ops.dispatch_modes import are_plain, is_compiling, is_faking, no_dispatch_mode_active
from flashvar.ops.flop_formulas import tell_counters
from flashvar.ops.sharding import register, rule_of

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_LIBRARY.define(
    "no_derivative(Tensor cause, Tensor? other, SymInt[] shape, ScalarType dtype, str refusal) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_BELOW: Final = torch._C._after_autograd_keyset
# The key sets of plain tensors that nothing below autograd intercepts.
_OF_KERNELS: Final = tuple(
    torch._C.DispatchKeySet(key).raw_repr()
    for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
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
        """Keep nothing."""
        ctx.set_materialize_grads(False)

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        return (ctx._autograd_function_id,)


class Refused(Differentiated):
    """Results whose derivatives are refused; a subclass may define one of them."""

    no_reverse_mode: ClassVar[str]
    no_forward_mode: ClassVar[str]
    # Indices of inputs that are written in place: autograd does not return what it saved of them.
    written: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Any) -> None:
        """Keep what the refusals need."""
        ctx.set_materialize_grads(False)
        ctx.inputs = likenesses(inputs)
        ctx.outputs = likenesses(output)
        ctx.save_for_forward(*tensors_of(inputs))
        unwritten = [x for index, x in enumerate(inputs) if index not in cls.written]
        ctx.save_for_backward(*tensors_of(unwritten))

    @classmethod
    def backward(cls, ctx: Any, *grads: Any) -> Any:
        """Refuse."""
        like, wanted = ctx.inputs, ctx.needs_input_grad
        return refuse(like, wanted, grads, cls.no_reverse_mode, ctx.saved_tensors)

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        """Refuse."""
        like, wanted = ctx.outputs, (True,) * len(ctx.outputs)
        return refuse(like, wanted, tangents, cls.no_forward_mode, ctx.saved_tensors)


def below_autograd(
    op: Any, kernel: Callable[..., Any], keyset: Any, arguments: tuple[Any, ...]
) -> Any:
    """The result of an op at the next level of transforms, or of its kernel.

    Not in the forward of a Function, where autograd is switched off for those levels too.
    """
    tell_counters()
    below = keyset & _BELOW
    with torch._C._AutoDispatchBelowAutograd():
        # The dispatcher would call the kernel too, but would unpack the arguments once more.
        if below.raw_repr() in _OF_KERNELS:
            return kernel(*arguments)
        return op.redispatch(below, *arguments)


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for plain tensors, without the support of transforms, which costs time."""
    apply: Callable[..., Any] = torch._C._FunctionBase.__dict__["apply"].__get__(None, function)
    return apply


def skips_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Whether a backward of these tensors may skip the dispatcher: nothing in torch intercepts it.

    Not while autograd records the backward, for derivatives of higher order.
    """
    if is_compiling() or torch.is_grad_enabled() or not no_dispatch_mode_active():
        return False
    given = [x for x in tensors if x is not None]
    try:
        for x in given:
            x.data_ptr()
    # Wrappers of other tensors have no memory.
    except RuntimeError:
        return False
    return are_plain(*given)


def attach(function: type[Differentiated], results: tuple[Any, ...], *inputs: Any) -> Any:
    """The results with the derivatives that a function defines."""
    with enable_single_level_autograd_function():
        return function.apply(results, *inputs)


# Whether torch.compile has traced an op at a dual level. With backend="eager" its graph enters the
# level in C++, so that forward_ad does not count it.
_graphs_enter_levels = False


def nothing_intercepts(*inputs: Any) -> bool:
    """Whether nothing in torch has to see a call that has come to an Autograd key.

    Unlike no_dispatch_mode_active() this is right for calls of graphs that enter dual levels.
    """
    global _graphs_enter_levels
    if forward_ad._current_level >= 0 and is_faking():
        _graphs_enter_levels = True
    if not no_dispatch_mode_active():
        return False
    return not (_graphs_enter_levels and _have_tangents(tensors_of(inputs)))


def may_be_differentiated(*inputs: Any) -> bool:
    """Whether autograd must record results; only `apply` knows which inputs have tangents."""
    if torch._C._is_fwd_grad_enabled() and not nothing_intercepts(*inputs):
        return True
    return torch.is_grad_enabled() and bool(torch._C._any_requires_grad(*inputs))


def has_tangent(*tensors: torch.Tensor) -> bool:
    """Whether an input has a tangent at this level of transforms."""
    return not nothing_intercepts(*tensors) and _have_tangents(tensors)


def _have_tangents(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of them has a tangent. Torch has one dual level; further ones are transforms."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    # Not traced: the question makes an alias of x. Inductor traces an op in place twice, the second
    # time the first graph, and refuses one that got longer.
    with disable_proxy_modes_tracing():
        return any(torch._VF._unpack_dual(x, level=0)[1] is not None for x in tensors)


def likenesses(values: Any) -> list[Any]:
    """Shape and dtype of each tensor, all that a refused derivative needs; None for the others."""
    return [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else None for x in values]


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments."""
    return [x for x in values if isinstance(x, torch.Tensor)]


def refuse(
    like: Any, wanted: Any, given: Any, refusal: str, inputs: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """Calls of no_derivative in place of the derivatives that are wanted.

    They depend on the gradients or tangents that are given, so that no graph computes them before,
    and on the inputs of the function, as its derivatives do.
    """
    if all(x is None for x in given):
        return (None,) * len(like)
    cause, *others = [x for x in (*given, *inputs) if x is not None and x.is_floating_point()]
    op = torch.ops.flashvar.no_derivative.default
    _register_sharding_rule()
    for other in others:  # one by one: the batches of is_grads_batched take no lists of tensors
        cause = op(cause, other, (), torch.float32, refusal)
    return tuple(
        op(cause, None, *one, refusal) if want and one is not None else None
        for one, want in zip(like, wanted, strict=True)
    )


def _register_sharding_rule() -> None:
    """Let DTensor call no_derivative, so that the refusal is not in its words."""
    op = torch.ops.flashvar.no_derivative.default
    register({op: rule_of(op, lambda arguments: ())})


# torch.compile calls the function at trace time, instead of tracing it.
_register_sharding_rule._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _NoDerivative(Refused):
    """The result of no_derivative, whose derivatives are refused in the same words."""

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Any) -> None:
        super().setup_context(ctx, inputs, output)
        ctx.refusal = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return refuse(ctx.inputs, ctx.needs_input_grad, grads, ctx.refusal, ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return refuse(ctx.outputs, (True,), tangents, ctx.refusal, ctx.saved_tensors)


def _raise(cause: Any, other: Any, shape: Any, dtype: Any, refusal: str) -> torch.Tensor:
    raise BackendUnavailableError(refusal)


def _fake(cause: Any, other: Any, shape: Any, dtype: Any, refusal: str) -> torch.Tensor:
    like: torch.Tensor = cause.new_empty(shape, dtype=dtype)
    return like


def _batched(
    info: Any, in_dims: Any, cause: Any, other: Any, shape: Any, dtype: Any, refusal: str
) -> tuple[torch.Tensor, int]:
    shape = (info.batch_size, *shape)
    return torch.ops.flashvar.no_derivative.default(cause, other, shape, dtype, refusal), 0


def _at_autograd_key(keyset: Any, *arguments: Any) -> Any:
    result = below_autograd(torch.ops.flashvar.no_derivative.default, _raise, keyset, arguments)
    if not may_be_differentiated(*arguments):
        return result
    return attach(_NoDerivative, (result,), *arguments)[0]


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("no_derivative", _raise, _key)
_LIBRARY.impl("no_derivative", _at_autograd_key, "Autograd", with_keyset=True)
torch.library.register_fake("flashvar::no_derivative", _fake, lib=_LIBRARY)
torch.library.register_vmap("flashvar::no_derivative", _batched, lib=_LIBRARY)
