"""causal_conv1d through a compiled binary: the C structs of `causal_conv1d.h`.

Sizes and strides are packed once per kind of call; each call adds its addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from flashvar.backends.cuda.call import CALL, DTYPES, call_head, function_of, launch_of
from flashvar.ops.causal_conv1d.spec import BACKWARD, FORWARD, UPDATE
from flashvar.ops.dtypes import DTYPES as NAMES

if TYPE_CHECKING:
    from flashvar.ops.causal_conv1d.problem import (
        BackwardLaunch,
        Convolution,
        ForwardLaunch,
        Gradients,
        UpdateLaunch,
    )
    from flashvar.selection.candidates import CandidateResult

# flashvar_strided: the address; three strides, dtype, reserved.
_LIKE: Final = struct.Struct("<qqqII")
_STRIDED: Final = f"Q{_LIKE.size}s"
# flashvar_causal_conv1d_problem: batch seqlen dim sequences width columns dtype flags; cu_seqlens;
# x weight bias state.
_SIZES: Final = struct.Struct("<qqqqiiII")
_PROBLEM: Final = f"{_SIZES.size}sQ{4 * _STRIDED}"
# flashvar_causal_conv1d_fwd_params: y residual final_state; final_columns, reserved.
_FORWARD: Final = struct.Struct(f"<{CALL}{3 * _STRIDED}iI{_PROBLEM}")
# flashvar_causal_conv1d_bwd_params: grad_x grad_weight grad_bias grad_state grad_y grad_final;
# final_columns, reserved.
_BACKWARD: Final = struct.Struct(f"<{CALL}{6 * _STRIDED}iI{_PROBLEM}")
# flashvar_causal_conv1d_update_params: y residual; state_indices, state_positions.
_UPDATE: Final = struct.Struct(f"<{CALL}{2 * _STRIDED}QQ{_PROBLEM}")
_SILU, _WIDE_SEQLENS, _WIDE_INDICES, _WIDE_POSITIONS = 1, 2, 4, 8

Optional: TypeAlias = torch.Tensor | None
# The fields of a call's problem.
_Pack: TypeAlias = Callable[["Convolution"], "tuple[bytes | int, ...]"]


def prepare_forward(
    chosen: CandidateResult,
    conv: Convolution,
    residual: Optional,
    y: torch.Tensor,
    final_state: torch.Tensor,
) -> ForwardLaunch:
    """The launch that writes the output and the final state."""
    function, device = function_of(FORWARD, chosen, y.device.index)
    launch = launch_of(function, FORWARD, chosen)
    packed = _pack_forward(device, conv, residual, y, final_state)

    def launch_forward(
        conv: Convolution, residual: Optional, y: torch.Tensor, final_state: Optional
    ) -> None:
        launch(packed(conv, residual, y, final_state))

    return launch_forward


def explain_forward(
    chosen: CandidateResult,
    conv: Convolution,
    residual: Optional,
    y: torch.Tensor,
    final_state: torch.Tensor,
) -> str:
    """How the binary reads the tensors of a call, and why."""
    function, device = function_of(FORWARD, chosen, y.device.index)
    like = conv, residual, y, final_state
    return function.explain(_pack_forward(device, *like)(*like))


def _pack_forward(
    device: int,
    conv: Convolution,
    residual: Optional,
    y: torch.Tensor,
    final_state: torch.Tensor,
) -> Callable[[Convolution, Optional, torch.Tensor, Optional], bytes]:
    head, pack, problem = call_head(_FORWARD, device), _FORWARD.pack, _problem(conv)
    of_y, of_residual, of_final = _like(y), _like(residual), _like(final_state)
    columns = final_state.shape[-1]
    stream = torch._C._cuda_getCurrentRawStream

    def packed(
        conv: Convolution, residual: Optional, y: torch.Tensor, final_state: Optional
    ) -> bytes:
        results = (y.data_ptr(), of_y, _address(residual), of_residual)
        states = (_address(final_state), of_final, columns, 0)
        return pack(head, stream(device), 0, 0, *results, *states, *problem(conv))

    return packed


def prepare_backward(
    chosen: CandidateResult,
    conv: Convolution,
    grad_y: torch.Tensor,
    grad_final: Optional,
    grads: Gradients,
) -> BackwardLaunch:
    """The launch that writes the gradients."""
    function, device = function_of(BACKWARD, chosen, grad_y.device.index)
    run = launch_of(function, BACKWARD, chosen)
    head, problem = call_head(_BACKWARD, device), _problem(conv)
    dtype = conv.x.dtype  # of y, and so of its gradient
    of_grads = [_like(one) for one in grads]
    of_y, of_final = _like(grad_y.to(dtype)), _like(grad_final)
    columns = 0 if grad_final is None else grad_final.shape[-1]

    def packed(
        workspace: Optional, conv: Convolution, grad_y: torch.Tensor, grad_final: Optional,
        grads: Gradients,
    ) -> bytes:  # fmt: skip
        written: list[int | bytes] = []
        for one, of_one in zip(grads, of_grads, strict=True):
            written += (_address(one), of_one)
        stream = torch._C._cuda_getCurrentRawStream(device)
        given = (grad_y.data_ptr(), of_y, _address(grad_final), of_final, columns, 0)
        call = (head, stream, _address(workspace), size)
        return _BACKWARD.pack(*call, *written, *given, *problem(conv))

    size = 0
    size = function.workspace(packed(None, conv, grad_y, grad_final, grads))

    def launch(
        conv: Convolution, grad_y: torch.Tensor, grad_final: Optional, grads: Gradients
    ) -> None:
        workspace = _workspace(size, grad_y.device)
        if grad_y.dtype != dtype:
            grad_y = grad_y.to(dtype)
        run(packed(workspace, conv, grad_y, grad_final, grads))

    return launch


def prepare_update(
    chosen: CandidateResult,
    conv: Convolution,
    residual: Optional,
    state_indices: Optional,
    state_positions: Optional,
    y: torch.Tensor,
) -> UpdateLaunch:
    """The launch that writes the output, and moves the tokens of x into the state."""
    function, device = function_of(UPDATE, chosen, y.device.index)
    run = launch_of(function, UPDATE, chosen)
    pool = conv.state
    assert pool is not None
    flags = _WIDE_INDICES * _is_wide(state_indices) + _WIDE_POSITIONS * _is_wide(state_positions)
    head, problem = call_head(_UPDATE, device), _problem(conv, pool.shape[0], flags)
    of_y, of_residual = _like(y), _like(residual)

    def launch(
        conv: Convolution, residual: Optional, state_indices: Optional, state_positions: Optional,
        y: torch.Tensor,
    ) -> None:  # fmt: skip
        stream = torch._C._cuda_getCurrentRawStream(device)
        results = (y.data_ptr(), of_y, _address(residual), of_residual)
        index_addresses = (_address(state_indices), _address(state_positions))
        run(_UPDATE.pack(head, stream, 0, 0, *results, *index_addresses, *problem(conv)))

    return launch


def _workspace(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _problem(conv: Convolution, sequences: int | None = None, flags: int = 0) -> _Pack:
    """Packs the problem of calls like this one."""
    x, weight, bias, state, cu_seqlens, silu = conv
    flags += _SILU * silu + _WIDE_SEQLENS * _is_wide(cu_seqlens)
    sizes = _SIZES.pack(
        *x.shape,
        conv.sequences if sequences is None else sequences,
        conv.width,
        0 if state is None else state.shape[-1],
        DTYPES[NAMES[x.dtype]],
        flags,
    )
    of_x, of_weight, of_bias, of_state = _like(x), _like(weight), _like(bias), _like(state)

    def fields(conv: Convolution) -> tuple[bytes | int, ...]:
        x, weight, bias, state, cu_seqlens, _ = conv
        return (
            *(sizes, _address(cu_seqlens), x.data_ptr(), of_x, weight.data_ptr(), of_weight),
            *(_address(bias), of_bias, _address(state), of_state),
        )

    return fields


def _like(tensor: Optional) -> bytes:
    """A flashvar_strided after its address. Dimensions with one entry get stride 0."""
    if tensor is None:
        return _LIKE.pack(0, 0, 0, 0, 0)
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    strides = [stride if size > 1 else 0 for stride, size in pairs]
    return _LIKE.pack(*(0,) * (3 - len(strides)), *strides, DTYPES[NAMES[tensor.dtype]], 0)


def _address(tensor: Optional) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _is_wide(indices: Optional) -> bool:
    return indices is not None and indices.dtype == torch.int64
