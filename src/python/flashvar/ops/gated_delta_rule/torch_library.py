"""How torch knows gated_delta_rule: its schemas, implementations, fakes and derivatives."""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.errors import BackendUnavailableError
from flashvar.ops.gated_delta_rule import run
from flashvar.ops.gated_delta_rule.inputs import check_initial_state, check_pool
from flashvar.ops.gated_delta_rule.spec import BACKWARD, FORWARD, UPDATE

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)

_INPUTS: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? a_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens, float? scale, bool qk_l2norm, bool beta_sigmoid, bool allow_neg_eigval, "
    "str state_layout, str backend"
)
_LIBRARY.define(
    f"{FORWARD}(Tensor? initial_state, {_INPUTS}) -> (Tensor out, Tensor final_state)", tags=_TAGS
)
_LIBRARY.define(
    f"{UPDATE}(Tensor(a!) states, Tensor state_indices, {_INPUTS}) -> Tensor out", tags=_TAGS
)
# Gradients of what is absent are empty.
_LIBRARY.define(
    f"{BACKWARD}(Tensor? grad_out, Tensor? grad_final_state, Tensor? initial_state, {_INPUTS})"
    " -> (Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor a_log, Tensor dt_bias, "
    "Tensor initial_state)",
    tags=_TAGS,
)

# Inputs of the forward that have gradients, in the order of the backward's results.
_DIFFERENTIABLE: Final = (1, 2, 3, 4, 5, 6, 7, 0)


def _forward_fake(
    initial_state: torch.Tensor | None, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *of_inputs, layout, _ = arguments
    inputs = run.given(tuple(of_inputs))
    if initial_state is not None:
        check_initial_state(inputs, initial_state, layout)
    return run.like_forward(inputs, layout)


def _update_fake(pool: torch.Tensor, indices: torch.Tensor, *arguments: Any) -> torch.Tensor:
    *of_inputs, layout, _ = arguments
    inputs = run.given(tuple(of_inputs))
    check_pool(inputs, pool, indices, layout)
    return run.like_forward(inputs, layout)[0]


def _backward_fake(
    grad_out: Any, grad_final_state: Any, initial_state: Any, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    *of_inputs, _, _ = arguments
    return run.like_backward(initial_state, run.given(tuple(of_inputs)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9])
    ctx.options = inputs[9:]


def _derivative(ctx: Any, grad_out: Any, grad_final_state: Any) -> tuple[Any, ...]:
    none: list[Any] = [None] * len(ctx.needs_input_grad)
    if grad_out is None and grad_final_state is None:
        return tuple(none)
    backward = torch.ops.flashvar.gated_delta_rule_bwd.default
    grads = backward(grad_out, grad_final_state, *ctx.saved_tensors, *ctx.options)
    for place, grad in zip(_DIFFERENTIABLE, grads, strict=True):
        if ctx.needs_input_grad[place]:
            none[place] = grad
    return tuple(none)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Their derivative is refused."""


def _second_derivative(ctx: Any, *grads: Any) -> Any:
    raise BackendUnavailableError(
        "gated_delta_rule has first derivatives only, got a request for the second (a backward "
        "through create_graph=True, torch.func.grad of a gradient, a Hessian): write the "
        "recurrence in torch's own functions there"
    )


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl(FORWARD, run.forward, _key)
    _LIBRARY.impl(UPDATE, run.update, _key)
    _LIBRARY.impl(BACKWARD, run.backward, _key)
torch.library.register_fake(f"flashvar::{FORWARD}", _forward_fake, lib=_LIBRARY)
torch.library.register_fake(f"flashvar::{UPDATE}", _update_fake, lib=_LIBRARY)
torch.library.register_fake(f"flashvar::{BACKWARD}", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd(
    f"flashvar::{FORWARD}", _derivative, setup_context=_keep, lib=_LIBRARY
)
torch.library.register_autograd(
    f"flashvar::{BACKWARD}", _second_derivative, setup_context=_keep_nothing, lib=_LIBRARY
)

gated_delta_rule_fwd: Final = torch.ops.flashvar.gated_delta_rule_fwd.default
gated_delta_rule_bwd: Final = torch.ops.flashvar.gated_delta_rule_bwd.default
gated_delta_rule_update: Final = torch.ops.flashvar.gated_delta_rule_update.default


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]
    """The forward with its derivative, for plain tensors, which may skip the dispatcher."""

    forward = staticmethod(run.forward)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_derivative)


def differentiable(
    initial_state: torch.Tensor | None, arguments: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out, and the state after each sequence."""
    out, final_state = _Differentiable.apply(initial_state, *arguments)
    return out, final_state
