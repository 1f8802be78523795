"""The functions of gated_delta_rule below autograd and the dispatcher.

Arguments come in the order of the schemas: tensors, then options.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final, cast

import torch

from flashvar.backends import backend as backend_of
from flashvar.errors import BackendUnavailableError
from flashvar.machine.system import gather_for_cpu
from flashvar.ops.gated_delta_rule import inputs as checks
from flashvar.ops.gated_delta_rule.problem import Backend, Inputs
from flashvar.ops.gated_delta_rule.spec import BACKWARD, MOST_K, SPEC
from flashvar.selection.request import Overrides

_TRITON: Final = find_spec("triton") is not None


def given(arguments: tuple[Any, ...]) -> Inputs:
    """The inputs of a call, checked; `scale` is None for K ** -0.5.

    Raises:
        InvalidInputError: with what was expected, what was found and what to do.
    """
    inputs = Inputs._make(arguments)
    checks.check(inputs)
    if inputs.scale is None:
        inputs = inputs._replace(scale=inputs.q.shape[-1] ** -0.5)
    return inputs


def forward(
    initial_state: torch.Tensor | None, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out, and the state after each sequence."""
    *of_inputs, layout, backend = arguments
    inputs = given(tuple(of_inputs))
    if initial_state is not None:
        checks.check_initial_state(inputs, initial_state, layout)
    checks.check_values(inputs)
    out, final_state = like_forward(inputs, layout)
    if out.numel() or final_state.numel():
        serving = _serving("forward", inputs, backend)
        serving.forward(inputs, _k_first(initial_state, layout), out, _view(final_state, layout))
    return out, final_state


def update(pool: torch.Tensor, indices: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Out; the states pool[indices] are those after each sequence then."""
    *of_inputs, layout, backend = arguments
    inputs = given(tuple(of_inputs))
    checks.check_pool(inputs, pool, indices, layout)
    checks.check_values(inputs)
    checks.check_indices(pool, indices)
    out = like_forward(inputs, layout)[0]
    if out.numel():
        serving = _serving("update", inputs, backend)
        serving.update(inputs, _view(pool, layout), indices, out)
        if not pool.is_inference():
            torch.autograd.graph.increment_version(pool)
    return out


def backward(
    grad_out: torch.Tensor | None,
    grad_final_state: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    """The gradients of all tensors that are differentiable; empty where there is no tensor."""
    *of_inputs, layout, backend = arguments
    inputs = given(tuple(of_inputs))
    serving = _serving("backward", inputs, backend)
    states = _k_first(initial_state, layout), _k_first(grad_final_state, layout)
    found = serving.backward(inputs, states[0], grad_out, states[1])
    grads = list(found)
    if found.initial_state is not None:
        grads[-1] = _view(found.initial_state, layout).contiguous()
    return tuple(inputs.q.new_empty(0) if grad is None else grad for grad in grads)


def like_forward(inputs: Inputs, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a forward returns, not yet written; packed rows of no sequence stay zeros."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    shape = checks.state_shape(inputs, inputs.sequences, layout)
    make = inputs.v.new_empty if inputs.cu_seqlens is None else inputs.v.new_zeros
    return make(inputs.v.shape), inputs.v.new_empty(shape, dtype=wide)


def like_backward(initial_state: torch.Tensor | None, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """What a backward returns, not yet written."""
    tensors = (*inputs[:5], inputs.a_log, inputs.dt_bias, initial_state)
    return tuple(inputs.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _view(state: torch.Tensor, layout: str) -> torch.Tensor:
    """States as [..., K, V]."""
    return state if layout == "kv" else state.transpose(-1, -2)


def _k_first(state: torch.Tensor | None, layout: str) -> torch.Tensor | None:
    return None if state is None else _view(state, layout)


def _serving(direction: str, inputs: Inputs, backend: str) -> Backend:
    """The backend of a call: Triton where it has kernels, else the reference.

    Raises:
        BackendUnavailableError: the named backend does not serve the call.
    """
    name = Overrides.from_environment(backend).backend
    reason = _not_in_triton(direction, inputs)
    if name == "cuda" or (name == "triton" and reason is not None):
        missing = "there are no compiled kernels of it" if name == "cuda" else reason
        raise BackendUnavailableError(
            f"{SPEC.name}, {direction}: expected backend {name!r} to serve it, found that "
            f'{missing}: leave backend out, or name "reference"'
        )
    if name == "auto":
        name = "triton" if reason is None else "reference"
    return cast("Backend", backend_of(name, SPEC.name))


def _not_in_triton(direction: str, inputs: Inputs) -> str | None:
    """Why Triton does not serve a call; None where it does."""
    if direction == "backward" and inputs.q.shape[-1] > MOST_K:
        return f"Triton's kernels of {BACKWARD} take q and k of head dims up to {MOST_K}"
    if inputs.q.dtype == torch.float64:
        return "Triton's kernels take no float64"
    if not _TRITON:
        return "triton is not installed"
    if not inputs.q.is_cuda and not gather_for_cpu().interpreted:
        return "the tensors are on the CPU"
    return None
