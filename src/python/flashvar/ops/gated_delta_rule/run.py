"""The functions of gated_delta_rule below autograd and the dispatcher.

Arguments come in the order of the schemas: tensors, then options.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch

from flashvar.errors import BackendUnavailableError
from flashvar.ops.gated_delta_rule import inputs as checks
from flashvar.ops.gated_delta_rule.problem import Backend, Inputs
from flashvar.ops.gated_delta_rule.spec import BACKWARD, FEW, FORWARD, MOST_K, STEP, UPDATE
from flashvar.ops.serving import serving
from flashvar.selection.candidates import CandidateResult
from flashvar.selection.request import Overrides


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
        chosen, serves = _serving(FORWARD, inputs, backend)
        launch: Any = serves.forward
        if chosen.binary is not None:
            launch = partial(launch, chosen)
        launch(inputs, _k_first(initial_state, layout), out, _view(final_state, layout))
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
        _, serves = _serving(UPDATE, inputs, backend)
        serves.update(inputs, _view(pool, layout), indices, out)
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
    _, serves = _serving(BACKWARD, inputs, backend)
    states = _k_first(initial_state, layout), _k_first(grad_final_state, layout)
    found = serves.backward(inputs, states[0], grad_out, states[1])
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


def _serving(function: str, inputs: Inputs, backend: str) -> tuple[CandidateResult, Backend]:
    """The candidate that serves a call, and its module.

    Raises:
        BackendUnavailableError: no candidate serves the call, or not the named one.
    """
    named = Overrides.from_environment(backend).backend
    unsuited = _unsuited(function, inputs, named)
    if unsuited is not None:
        other, reason = unsuited
        if named != "auto":
            raise BackendUnavailableError(
                f"{function}: expected backend {named!r} to serve it, found that {reason}: leave "
                f'backend out, or name "{other}"'
            )
        backend = other
    return cast("tuple[CandidateResult, Backend]", serving(function, inputs.q, backend, inputs))


def _unsuited(function: str, inputs: Inputs, named: str) -> tuple[str, str] | None:
    """Where the backend that selection would take does not serve a call: another, and why."""
    if not inputs.q.is_cuda:
        return None
    if function == BACKWARD and named in ("auto", "triton") and inputs.head_dim > MOST_K:
        return "reference", f"Triton's kernels take q and k of head dims to {MOST_K}"
    if function == FORWARD and named in ("auto", "cuda"):
        dims = inputs.head_dim, inputs.v.shape[3]
        if any(dim % STEP for dim in dims):
            return "triton", f"binaries take head dims that are multiples of {STEP}, not {dims}"
        if not all(map(_rows_are_aligned, inputs[:3])):
            return "triton", "binaries take rows of q, k and v that start at multiples of 16 bytes"
        if named == "auto" and inputs.q.shape[0] * inputs.q.shape[1] < FEW * inputs.sequences:
            return "triton", "few tokens are faster one by one"
    return None


def _rows_are_aligned(x: torch.Tensor) -> bool:
    strides = (stride for stride, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1)
    return (
        x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for stride in strides)
    )
