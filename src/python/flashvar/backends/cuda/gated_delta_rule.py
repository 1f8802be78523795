"""gated_delta_rule through a compiled binary: the C structs of `gated_delta_rule.h`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar.backends.cuda.call import (
    CALL,
    DTYPES,
    TENSOR,
    Template,
    call_head,
    function_of,
    launch_of,
)
from flashvar.ops.dtypes import DTYPES as NAMES
from flashvar.ops.gated_delta_rule.problem import make_gradients
from flashvar.ops.gated_delta_rule.spec import BACKWARD, FORWARD, UPDATE
from flashvar.ops.plans import maker, prototype

if TYPE_CHECKING:
    from flashvar.ops.gated_delta_rule.problem import BackwardLaunch, Gradients, Inputs, Launch
    from flashvar.selection.candidates import CandidateResult

# flashvar_gate: data, batch, sequence and head stride, dtype, reserved.
_GATE: Final = "QqqqII"
# flashvar_state: data, sequence, head, k and v stride.
_STATE: Final = "Qqqqq"
# flashvar_gated_delta_rule_problem: sequences seqlen heads_qk heads head_dim head_dim_v dtype flags
# scale reserved cu_seqlens; q k v; g beta a_log dt_bias; initial_state.
_PROBLEM: Final = f"qqiiiiIIfIQ{3 * TENSOR}{4 * _GATE}{_STATE}"
# flashvar_gated_delta_rule_fwd_params: out, final_state, the problem.
_FORWARD: Final = struct.Struct(f"<{CALL}{TENSOR}{_STATE}{_PROBLEM}")
# flashvar_gated_delta_rule_update_params: the same; state_indices, stride, states, state_dtype,
# index_bytes.
_UPDATE: Final = struct.Struct(f"{_FORWARD.format}QqqII")
# flashvar_gated_delta_rule_bwd_params: grad_out, grad_final_state; grad_q grad_k grad_v; grad_g
# grad_beta grad_a_log grad_dt_bias; grad_initial_state, the problem.
_BACKWARD: Final = struct.Struct(
    f"<{CALL}{TENSOR}{_STATE}{3 * TENSOR}{4 * _GATE}{_STATE}{_PROBLEM}"
)
_QK_L2NORM, _BETA_SIGMOID, _NEGATIVE_EIGVAL = 1, 2, 4
_NO_GATE: Final = (0, 0, 0, 0, DTYPES["fp32"], 0)
_NO_STATE: Final = (0, 0, 0, 0, 0)


def prepare_forward(
    chosen: CandidateResult,
    inputs: Inputs,
    initial_state: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
) -> Launch:
    """The launch that writes out, and the state after each sequence, by chunks."""
    function, device = function_of(FORWARD, chosen, out.device.index)
    fields = _fields(_FORWARD, device, inputs, initial_state, out, final_state)
    template = Template(_FORWARD, fields)
    size = function.workspace(template.packed)
    make_workspace = maker(torch.empty(size, dtype=torch.uint8, device=out.device))
    of_call = _of_call(template, device)
    run, converts = launch_of(function, FORWARD, chosen), _converts(inputs)

    def launch(
        inputs: Inputs,
        states: torch.Tensor | None,
        indices: torch.Tensor | None,
        out: torch.Tensor,
        final_state: torch.Tensor | None,
    ) -> None:
        if converts:
            inputs = inputs._replace(cu_seqlens=_offsets(inputs))
        workspace = make_workspace()
        results = (out.data_ptr(), _address(final_state))
        run(of_call(workspace.data_ptr(), size, results, inputs, states))

    return launch


def prepare_update(
    chosen: CandidateResult,
    inputs: Inputs,
    states: torch.Tensor | None,
    indices: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
) -> Launch:
    """The launch that does so token by token; with indices the states are those of a pool."""
    function, device = function_of(UPDATE, chosen, out.device.index)
    one = final_state if states is None else states
    state_dtype = DTYPES["fp32" if one is None else NAMES[one.dtype]]
    pool = (0, 0, 0, state_dtype, 0)
    if indices is not None and states is not None:
        pool = (0, *indices.stride(), states.shape[0], state_dtype, indices.element_size())
    template = Template(
        _UPDATE, (*_fields(_UPDATE, device, inputs, states, out, final_state), *pool)
    )
    of_call, converts = _of_call(template, device), _converts(inputs)
    run = launch_of(function, UPDATE, chosen)

    def launch(
        inputs: Inputs,
        states: torch.Tensor | None,
        indices: torch.Tensor | None,
        out: torch.Tensor,
        final_state: torch.Tensor | None,
    ) -> None:
        if converts:
            inputs = inputs._replace(cu_seqlens=_offsets(inputs))
        results = (out.data_ptr(), _address(final_state))
        run(of_call(0, 0, results, inputs, states, (_address(indices),)))

    return launch


def prepare_backward(
    chosen: CandidateResult,
    inputs: Inputs,
    initial_state: torch.Tensor | None,
    grad_out: torch.Tensor | None,
    grad_final_state: torch.Tensor | None,
) -> BackwardLaunch:
    """The launch that computes the gradients of all inputs."""
    function, device = function_of(BACKWARD, chosen, inputs.q.device.index)
    # Binaries write nothing where there is no element of v, and packed rows of no sequence.
    whole = inputs.cu_seqlens is None and inputs.v.numel() > 0
    make = _new_empty if whole else _new_zeros
    zeros_like = torch.zeros_like
    results = [None if x is None else make(x) for x in (*inputs[:7], initial_state)]
    given = zeros_like(inputs.v) if grad_out is None else _with_aligned_rows(grad_out)
    copies = grad_out is not None and given is not grad_out
    fields = (
        *(call_head(_BACKWARD, device), 0, 0, 0),
        *_tensor(given),
        *_state(grad_final_state),
        *(field for x in results[:3] if x is not None for field in _tensor(x)),
        *(field for x in results[3:7] for field in _gate(x)),
        *_state(results[7]),
        *_problem(inputs, _offsets(inputs), initial_state),
    )
    template = Template(_BACKWARD, fields)
    size = function.workspace(template.packed)
    make_workspace = maker(torch.empty(size, dtype=torch.uint8, device=inputs.q.device))
    *others, of_state = results
    makers = [
        None if x is None else maker(x) if whole else partial(zeros_like, prototype(x))
        for x in others
    ]
    state_like = None if of_state is None else prototype(of_state)
    of_call, run = _of_call(template, device), launch_of(function, BACKWARD, chosen)
    converts = _converts(inputs)

    def launch(
        inputs: Inputs,
        initial_state: torch.Tensor | None,
        grad_out: torch.Tensor | None,
        grad_final_state: torch.Tensor | None,
    ) -> Gradients:
        if converts:
            inputs = inputs._replace(cu_seqlens=_offsets(inputs))
        if grad_out is None:
            grad_out = zeros_like(inputs.v)
        elif copies:
            grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        grads = [None if make is None else make() for make in makers]
        grads.append(None if state_like is None else zeros_like(state_like))
        workspace = make_workspace()
        results = tuple(
            [0 if x is None else x.data_ptr() for x in (grad_out, grad_final_state, *grads)]
        )
        run(of_call(workspace.data_ptr(), size, results, inputs, initial_state))
        return make_gradients(grads)

    return launch


def _new_empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _new_zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose rows start at multiples of 16 bytes: itself if it has such."""
    elements = 16 // x.element_size()
    strides = (stride for stride, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1)
    aligned = x.data_ptr() % 16 == 0 and all(stride % elements == 0 for stride in strides)
    return x if aligned and x.stride(3) == 1 else x.clone(memory_format=torch.contiguous_format)


def _offsets(inputs: Inputs) -> torch.Tensor | None:
    """cu_seqlens as binaries read it."""
    offsets = inputs.cu_seqlens
    return None if offsets is None else offsets.to(torch.int32).contiguous()


def _converts(like: Inputs) -> bool:
    """Whether calls like `like` need offsets of their own, which live until the launch."""
    return _offsets(like) is not like.cu_seqlens


def _of_call(template: Template, device: int) -> Callable[..., bytes]:
    """Packs the struct of a call: addresses of results come first in it, others last.

    The offsets are as binaries read them.
    """
    pack, stream_of = template.pack, torch._C._cuda_getCurrentRawStream

    def packed(
        workspace: int,
        size: int,
        results: tuple[int, ...],
        inputs: Inputs,
        states: torch.Tensor | None,
        others: tuple[int, ...] = (),
    ) -> bytes:
        q, k, v, g, beta, a_log, dt_bias, cu_seqlens, _, _, _, _ = inputs
        of_inputs = (
            0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            0 if g is None else g.data_ptr(),
            beta.data_ptr(),
            0 if a_log is None else a_log.data_ptr(),
            0 if dt_bias is None else dt_bias.data_ptr(),
            0 if states is None else states.data_ptr(),
        )
        return pack((stream_of(device), workspace, size, *results, *of_inputs, *others))

    return packed


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _fields(
    params: struct.Struct,
    device: int,
    inputs: Inputs,
    states: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
) -> tuple[Any, ...]:
    """The fields that both structs have."""
    problem = _problem(inputs, _offsets(inputs), states)
    head = call_head(params, device)
    return (head, 0, 0, 0, *_tensor(out), *_state(final_state), *problem)


def _problem(
    inputs: Inputs, cu_seqlens: torch.Tensor | None, initial_state: torch.Tensor | None
) -> tuple[int | float, ...]:
    flags = _QK_L2NORM * inputs.qk_l2norm + _BETA_SIGMOID * inputs.beta_sigmoid
    return (
        inputs.sequences,
        inputs.q.shape[1],
        inputs.q.shape[2],
        inputs.heads,
        inputs.q.shape[3],
        inputs.v.shape[3],
        DTYPES[NAMES[inputs.q.dtype]],
        flags + _NEGATIVE_EIGVAL * inputs.allow_neg_eigval,
        inputs.scale,
        0,
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
        *_tensor(inputs.q),
        *_tensor(inputs.k),
        *_tensor(inputs.v),
        *_gate(inputs.g),
        *_gate(inputs.beta),
        *_gate(inputs.a_log),
        *_gate(inputs.dt_bias),
        *_state(initial_state),
    )


def _tensor(x: torch.Tensor) -> tuple[int, ...]:
    """A flashvar_tensor. Dimensions with one entry, whose stride is arbitrary, get stride 0."""
    pairs = zip(x.stride()[:3], x.shape, strict=False)
    return (x.data_ptr(), *(stride if size > 1 else 0 for stride, size in pairs))


def _gate(x: torch.Tensor | None) -> tuple[int, ...]:
    """A flashvar_gate of [batch, seqlen, heads] or [heads]."""
    if x is None:
        return _NO_GATE
    return (x.data_ptr(), *(0,) * (3 - x.ndim), *x.stride(), DTYPES[NAMES[x.dtype]], 0)


def _state(x: torch.Tensor | None) -> tuple[int, ...]:
    """A flashvar_state of [sequences, heads, K, V]."""
    return _NO_STATE if x is None else (x.data_ptr(), *x.stride())
