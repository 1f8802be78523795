"""Attention through a compiled binary: packs the structs of `attention.h` and launches."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from flashvar.backends.cuda.call import CALL, DTYPES, TENSOR, call_head, function_of
from flashvar.binaries.loader import Function
from flashvar.ops.attention.spec import BACKWARD, FORWARD
from flashvar.ops.plans import maker

if TYPE_CHECKING:
    from flashvar.ops.attention.problem import (
        BackwardLaunch,
        BackwardProblem,
        BiasStrides,
        Gradients,
        Inputs,
        Launch,
        Problem,
    )
    from flashvar.selection.candidates import CandidateResult

_Result = TypeVar("_Result")

# flashvar_attention_problem: first the fields that are constant for a problem, then those of a
# call.
_SIZES: Final = struct.Struct(
    "<qqqqq"  # batch seqlen_q seqlen_k total_q total_k
    "iiiiII"  # heads_q heads_kv head_dim head_dim_v dtype flags
    "ffiifI"  # scale softcap window_left window_right dropout_p bias_dtype
)
# cu_seqlens_q cu_seqlens_k seqused_k alibi_slopes alibi_batch_stride rng bias; sinks delta
# sinks_dtype reserved
_PROBLEM: Final = struct.Struct(f"<{_SIZES.size}sQQQQqQ{TENSOR}QQII")
# flashvar_attention_fwd_params: q, k, v and out, then lse.
_FORWARD: Final = struct.Struct(f"<{CALL}{'Q24s' * 4}Q{_PROBLEM.size}s")
# flashvar_attention_bwd_params: q, k, v, out, grad_out, grad_q, grad_k, grad_v and grad_bias, then
# lse and grad_lse.
_BACKWARD: Final = struct.Struct(f"<{CALL}{'Q24s' * 9}QQ{_PROBLEM.size}s")
_NO_TENSOR: Final = (0, 0, 0, 0)
_NO_SINKS: Final = (0, 0, 0, 0)
_ALIGNED: Final = 256  # a placeholder for addresses: aligned, and not NULL

_CAUSAL: Final = 1
_WINDOW_LEFT: Final = 2
_WINDOW_RIGHT: Final = 4
_DETERMINISTIC: Final = 8
_BIAS_FLOAT32: Final = 1


def prepare_forward(problem: Problem, chosen: CandidateResult) -> Launch:
    """Look up the function in the chosen binary; pack everything but streams and addresses."""
    function, device = function_of(FORWARD, chosen, problem.device)
    workspace = _forward_workspace(problem, device, function)
    return _forward(problem, device, function.launch, workspace)


def explain_forward(
    problem: Problem, chosen: CandidateResult
) -> Callable[[Inputs, torch.Tensor, torch.Tensor | None], str]:
    """A function that returns which kernels the binary launches for a call, and why."""
    function, device = function_of(FORWARD, chosen, problem.device)
    return _forward(problem, device, function.explain, 0)


def prepare_backward(problem: BackwardProblem, chosen: CandidateResult) -> BackwardLaunch:
    """As `prepare_forward`."""
    function, device = function_of(BACKWARD, chosen, problem.forward.device)
    whole = _whole_bias(problem)
    workspace = _backward_workspace(whole or problem, device, function)
    launch = _backward(whole or problem, device, function.launch, workspace)
    return launch if whole is None else _summed(launch, whole)


def explain_backward(problem: BackwardProblem, chosen: CandidateResult) -> Callable[..., str]:
    """As `explain_forward`; the function has the arguments of a BackwardLaunch."""
    function, device = function_of(BACKWARD, chosen, problem.forward.device)
    return _backward(_whole_bias(problem) or problem, device, function.explain, 0)


def _whole_bias(problem: BackwardProblem) -> BackwardProblem | None:
    """The problem with a gradient of the bias for every score, where that of the call is no use.

    The kernels add up what a broadcast bias shares in no fixed order. In a deterministic call they
    write what is added up, and torch does so in order; None: they may add it up themselves.
    """
    forward, strides = problem.forward, problem.grad_bias
    if strides is None or not forward.deterministic:
        return None
    sizes = (forward.batch, forward.heads_q, forward.seqlen_q)
    if all(stride or size <= 1 for stride, size in zip(strides, sizes, strict=True)):
        return None
    rows = forward.seqlen_q * forward.seqlen_k
    whole = strides._replace(batch=forward.heads_q * rows, heads=rows, query=forward.seqlen_k)
    return replace(problem, grad_bias=whole)


def _summed(launch: BackwardLaunch, problem: BackwardProblem) -> BackwardLaunch:
    """The launch with the gradient of every score summed to that of the bias afterwards."""
    forward = problem.forward
    shape = (forward.batch, forward.heads_q, forward.seqlen_q, forward.seqlen_k)

    def launch_and_sum(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
        delta: torch.Tensor | None = None,
    ) -> None:
        assert grads.bias is not None
        whole = grads.bias.new_zeros(shape)
        launch(inputs, out, lse, grad_out, grad_lse, grads._replace(bias=whole), delta)
        grads.bias.add_(whole.sum_to_size(grads.bias.shape))

    return launch_and_sum


def _forward(
    problem: Problem, device: int, run: Callable[[bytes], _Result], workspace_size: int
) -> Callable[..., _Result]:
    """A launch that returns the result of `run` of the packed call."""
    stream_of = torch._C._cuda_getCurrentRawStream
    pack = _FORWARD.pack
    head = call_head(_FORWARD, device)
    q_strides, k_strides, v_strides, out_strides = (
        struct.pack("<qqq", *strides) for strides in (problem.q, problem.k, problem.v, problem.out)
    )
    constant, tail = _tail(problem)
    make_workspace = _workspaces(workspace_size, device)

    def launch(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> _Result:
        workspace = make_workspace()
        return run(
            pack(
                head,
                stream_of(device),
                0 if workspace is None else workspace.data_ptr(),
                workspace_size,
                inputs[0].data_ptr(),
                q_strides,
                inputs[1].data_ptr(),
                k_strides,
                inputs[2].data_ptr(),
                v_strides,
                out.data_ptr(),
                out_strides,
                0 if lse is None else lse.data_ptr(),
                constant or tail(inputs),
            )
        )

    return launch


def _forward_workspace(problem: Problem, device: int, function: Function) -> int:
    """The size of the workspace; it depends only on which addresses are NULL, not on a call."""
    strides = struct.pack("<qqq", *problem.q)
    packed = _FORWARD.pack(
        call_head(_FORWARD, device),
        *(0, 0, 0),
        *((_ALIGNED, strides) * 4),
        0,
        _placeholder(problem),
    )
    return function.workspace(packed)


def _backward(
    problem: BackwardProblem,
    device: int,
    run: Callable[[bytes], _Result],
    workspace_size: int,
) -> Callable[..., _Result]:
    """As `_forward`, with the arguments of a BackwardLaunch."""
    forward = problem.forward
    stream_of = torch._C._cuda_getCurrentRawStream
    pack = _BACKWARD.pack
    head = call_head(_BACKWARD, device)
    q_strides, k_strides, v_strides, out_strides, grad_out_strides = (
        struct.pack("<qqq", *strides)
        for strides in (forward.q, forward.k, forward.v, forward.out, problem.grad_out)
    )
    grad_q_strides, grad_k_strides, grad_v_strides = (
        struct.pack("<qqq", *strides)
        for strides in (problem.grad_q, problem.grad_k, problem.grad_v)
    )
    grad_bias_strides = struct.pack("<qqq", *_bias_strides(problem.grad_bias))
    constant, tail = _tail(forward)
    make_workspace = _workspaces(workspace_size, device)

    def launch(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
        delta: torch.Tensor | None = None,
    ) -> _Result:
        workspace = make_workspace()
        return run(
            pack(
                head,
                stream_of(device),
                0 if workspace is None else workspace.data_ptr(),
                workspace_size,
                inputs[0].data_ptr(),
                q_strides,
                inputs[1].data_ptr(),
                k_strides,
                inputs[2].data_ptr(),
                v_strides,
                out.data_ptr(),
                out_strides,
                grad_out.data_ptr(),
                grad_out_strides,
                grads[0].data_ptr(),
                grad_q_strides,
                grads[1].data_ptr(),
                grad_k_strides,
                grads[2].data_ptr(),
                grad_v_strides,
                _address(grads[3]),
                grad_bias_strides,
                lse.data_ptr(),
                0 if grad_lse is None else grad_lse.data_ptr(),
                constant or tail(inputs, delta),
            )
        )

    return launch


def _backward_workspace(problem: BackwardProblem, device: int, function: Function) -> int:
    """As `_forward_workspace`."""
    strides = struct.pack("<qqq", *problem.forward.q)
    bias = (0 if problem.grad_bias is None else _ALIGNED, strides)
    packed = _BACKWARD.pack(
        call_head(_BACKWARD, device),
        *(0, 0, 0),
        *((_ALIGNED, strides) * 8),
        *bias,
        _ALIGNED,
        0,
        _placeholder(problem.forward),
    )
    return function.workspace(packed)


def _workspaces(size: int, device: int) -> Callable[[], torch.Tensor | None]:
    """The function that allocates workspaces of `size` bytes; None if none is needed."""
    if size == 0:
        return lambda: None
    return maker(torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}"))


def _sizes(problem: Problem) -> bytes:
    flags = _CAUSAL if problem.window_right == 0 else 0
    flags |= _WINDOW_LEFT if problem.window_left >= 0 else 0
    flags |= _WINDOW_RIGHT if problem.window_right > 0 else 0
    flags |= _DETERMINISTIC if problem.deterministic else 0
    return _SIZES.pack(
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.total_q or 0,
        problem.total_k or 0,
        problem.heads_q,
        problem.heads_kv,
        problem.head_dim,
        problem.head_dim_v,
        DTYPES[problem.dtype],
        flags,
        problem.scale,
        problem.softcap,
        max(problem.window_left, 0),
        max(problem.window_right, 0),
        problem.dropout_p,
        _BIAS_FLOAT32 if problem.bias_dtype == "fp32" else 0,
    )


def _tail(problem: Problem) -> tuple[bytes | None, Callable[..., bytes]]:
    """The packed problem if it is the same at every call, else None; and a function to pack it."""
    sizes, pack = _sizes(problem), _PROBLEM.pack
    alibi_stride = problem.alibi_batch_stride or 0
    sinks_dtype = _sinks_dtype(problem)

    def tail(inputs: Inputs, delta: torch.Tensor | None = None) -> bytes:
        return pack(
            sizes,
            _address(inputs.cu_seqlens_q),
            _address(inputs.cu_seqlens_k),
            _address(inputs.seqused_k),
            _address(inputs.alibi_slopes),
            alibi_stride,
            # The ABI requires NULL unless dropout_p is positive.
            _address(inputs.rng_state) if problem.dropout_p > 0 else 0,
            *_bias(inputs.bias, problem.bias),
            _address(inputs.sinks),
            _address(delta),
            sinks_dtype,
            0,
        )

    if _has_tensors(problem):
        return None, tail
    return pack(sizes, 0, 0, 0, 0, alibi_stride, 0, *_NO_TENSOR, *_NO_SINKS), tail


def _placeholder(problem: Problem) -> bytes:
    """The packed problem with a placeholder for every address of a call."""
    return _PROBLEM.pack(
        _sizes(problem),
        _ALIGNED if problem.total_q is not None else 0,
        _ALIGNED if problem.total_k is not None else 0,
        _ALIGNED if problem.has_seqused_k else 0,
        _ALIGNED if problem.alibi_batch_stride is not None else 0,
        problem.alibi_batch_stride or 0,
        _ALIGNED if problem.dropout_p > 0 else 0,
        *(_NO_TENSOR if problem.bias is None else (_ALIGNED, *_bias_strides(problem.bias))),
        *(0 if problem.sinks_dtype is None else _ALIGNED, 0, _sinks_dtype(problem), 0),
    )


def _has_tensors(problem: Problem) -> bool:
    return (
        problem.total_q is not None
        or problem.total_k is not None
        or problem.has_seqused_k
        or problem.bias is not None
        or problem.sinks_dtype is not None
        or problem.alibi_batch_stride is not None
        or problem.dropout_p > 0
    )


def _sinks_dtype(problem: Problem) -> int:
    return 0 if problem.sinks_dtype is None else DTYPES[problem.sinks_dtype]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _bias(tensor: torch.Tensor | None, strides: BiasStrides | None) -> tuple[int, int, int, int]:
    return (_address(tensor), *_bias_strides(strides))


def _bias_strides(strides: BiasStrides | None) -> tuple[int, int, int]:
    """The strides in the order of the struct: batch, query, heads."""
    return (0, 0, 0) if strides is None else (strides.batch, strides.query, strides.heads)
