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
    PerCall,
    Template,
    call_head,
    function_of,
    launch_of,
    present,
)
from flashvar.ops.dtypes import DTYPES as NAMES
from flashvar.ops.gated_delta_rule.spec import BACKWARD, FORWARD, UPDATE
from flashvar.ops.plans import maker, prototype

if TYPE_CHECKING:
    from flashvar.ops.gated_delta_rule.problem import BackwardLaunch, Given, Inputs, Launch
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
_STREAM_AND_WORKSPACE: Final = (PerCall(0),) * 3
_TENSORS: Final = 8  # q to cu_seqlens
# Where calls have the tensors of structs: cu_seqlens, q to dt_bias, states, indices.
_OF_FORWARD: Final = (7, *range(7), 8, 9)
_OF_BACKWARD: Final = (10, *range(3, 10), 2)
_V_IN_BACKWARD: Final = 5


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
    tensors_of = _tensors_of((*inputs[:_TENSORS], initial_state, None), _OF_FORWARD)
    run, pack = launch_of(function, FORWARD, chosen), template.pack
    stream_of, data_ptr = torch._C._cuda_getCurrentRawStream, torch.Tensor.data_ptr

    def launch(given: Given, out: torch.Tensor, final_state: torch.Tensor | None) -> None:
        tensors, workspace = tensors_of(given), make_workspace()
        after = 0 if final_state is None else final_state.data_ptr()
        results = stream_of(device), workspace.data_ptr(), size, out.data_ptr(), after
        run(pack((*results, *map(data_ptr, tensors))))

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
    pool: tuple[int, ...] = (0, 0, 0, state_dtype, 0)
    if indices is not None and states is not None:
        at = PerCall(indices.data_ptr())
        pool = (at, *indices.stride(), states.shape[0], state_dtype, indices.element_size())
    fields = _fields(_UPDATE, device, inputs, states, out, final_state)
    pack = Template(_UPDATE, (*fields, *pool)).pack
    tensors_of = _tensors_of((*inputs[:_TENSORS], states, indices), _OF_FORWARD)
    run = launch_of(function, UPDATE, chosen)
    stream_of, data_ptr = torch._C._cuda_getCurrentRawStream, torch.Tensor.data_ptr

    def launch(given: Given, out: torch.Tensor, final_state: torch.Tensor | None) -> None:
        tensors = tensors_of(given)
        after = 0 if final_state is None else final_state.data_ptr()
        results = stream_of(device), 0, 0, out.data_ptr(), after
        run(pack((*results, *map(data_ptr, tensors))))

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
        *(call_head(_BACKWARD, device), *_STREAM_AND_WORKSPACE),
        *_tensor(given),
        *_state(grad_final_state),
        *(field for x in results[:3] if x is not None for field in _tensor(x)),
        *(field for x in results[3:7] for field in _gate(x)),
        *_state(results[7]),
        *_problem(inputs, _offsets(inputs.cu_seqlens), initial_state),
    )
    template = Template(_BACKWARD, fields)
    size = function.workspace(template.packed)
    make_workspace = maker(torch.empty(size, dtype=torch.uint8, device=inputs.q.device))
    makers = [
        None if x is None else maker(x) if whole else partial(zeros_like, prototype(x))
        for x in results[:-1]
    ]
    of_state = results[-1]
    makers.append(None if of_state is None else partial(zeros_like, prototype(of_state)))
    tensors = (grad_out, grad_final_state, initial_state, *inputs[:_TENSORS])
    tensors_of = _tensors_of(tensors, _OF_BACKWARD)
    run, pack = launch_of(function, BACKWARD, chosen), template.pack
    stream_of, data_ptr = torch._C._cuda_getCurrentRawStream, torch.Tensor.data_ptr

    def launch(tensors: Given) -> list[torch.Tensor | None]:
        given, (grad_out, grad_final_state) = tensors_of(tensors), tensors[:2]
        if grad_out is None:
            grad_out = zeros_like(tensors[_V_IN_BACKWARD])
        elif copies:
            grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        grads = [None if make is None else make() for make in makers]
        workspace = make_workspace()
        results = [x for x in (grad_out, grad_final_state, *grads) if x is not None]
        call = stream_of(device), workspace.data_ptr(), size
        run(pack((*call, *map(data_ptr, results), *map(data_ptr, given))))
        return grads

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


def _offsets(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """cu_seqlens as binaries read it."""
    return None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous()


def _tensors_of(like: Given, order: tuple[int, ...]) -> Callable[[Given], Any]:
    """The function that takes those tensors of `order` out of calls' that calls like this one have.

    The offsets, first of the order, are as binaries read them: they live as long as the result.
    """
    tensors_of = present(like, order)
    offsets = like[order[0]]
    if _offsets(offsets) is offsets:
        return tensors_of

    def with_offsets(given: Given) -> list[torch.Tensor | None]:
        offsets, *others = tensors_of(given)
        return [_offsets(offsets), *others]

    return with_offsets


def _fields(
    params: struct.Struct,
    device: int,
    inputs: Inputs,
    states: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
) -> tuple[Any, ...]:
    """The fields that both structs have."""
    problem = _problem(inputs, _offsets(inputs.cu_seqlens), states)
    after = (PerCall(0), *_NO_STATE[1:]) if final_state is None else _state(final_state)
    head = call_head(params, device)
    return (head, *_STREAM_AND_WORKSPACE, *_tensor(out), *after, *problem)


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
        0 if cu_seqlens is None else PerCall(cu_seqlens.data_ptr()),
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
    return (PerCall(x.data_ptr()), *(stride if size > 1 else 0 for stride, size in pairs))


def _gate(x: torch.Tensor | None) -> tuple[int, ...]:
    """A flashvar_gate of [batch, seqlen, heads] or [heads]."""
    if x is None:
        return _NO_GATE
    return (PerCall(x.data_ptr()), *(0,) * (3 - x.ndim), *x.stride(), DTYPES[NAMES[x.dtype]], 0)


def _state(x: torch.Tensor | None) -> tuple[int, ...]:
    """A flashvar_state of [sequences, heads, K, V]."""
    return _NO_STATE if x is None else (PerCall(x.data_ptr()), *x.stride())
