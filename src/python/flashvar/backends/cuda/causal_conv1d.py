"""causal_conv1d through a compiled binary: the C structs of `causal_conv1d.h`.

Sizes and strides are packed once per kind of call; each call adds its addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from flashvar.backends.cuda.call import (
    CALL,
    DTYPES,
    PerCall,
    Template,
    call_head,
    function_of,
    launch_of,
    present,
)
from flashvar.ops.causal_conv1d.spec import BACKWARD, FORWARD, UPDATE
from flashvar.ops.dtypes import DTYPES as NAMES
from flashvar.ops.plans import maker

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
_SILU, _INT64_SEQLENS, _INT64_INDICES, _INT64_POSITIONS = 1, 2, 4, 8

Optional: TypeAlias = torch.Tensor | None
# Where a Convolution has the tensors of the struct.
_ORDER: Final = (4, 0, 1, 2, 3)


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
    columns = final_state.shape[-1]
    final = final_state if columns else None
    of_final = (PerCall(0) if columns else 0, _strided(final_state)[1])
    results = (*_strided(y), *_strided(residual), *of_final, columns, 0)
    fields = (call_head(_FORWARD, device), PerCall(0), 0, 0, *results, *_problem(conv))
    pack = Template(_FORWARD, fields).pack
    tensors_of = present((*conv, y, residual, final), (6, 7, 8, *_ORDER))
    stream_of, data_ptr = torch._C._cuda_getCurrentRawStream, torch.Tensor.data_ptr

    def packed(
        conv: Convolution, residual: Optional, y: torch.Tensor, final_state: Optional
    ) -> bytes:
        tensors = tensors_of((*conv, y, residual, final_state))
        return pack((stream_of(device), *map(data_ptr, tensors)))

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
    dtype = conv.x.dtype  # of y, and so of its gradient
    columns = 0 if grad_final is None else grad_final.shape[-1]
    results = [field for one in grads for field in _strided(one)]
    given = (*_strided(grad_y.to(dtype)), *_strided(grad_final), columns, 0)
    call = (call_head(_BACKWARD, device), *(PerCall(0),) * 3)
    template = Template(_BACKWARD, (*call, *results, *given, *_problem(conv)))
    size = function.workspace(template.packed)
    make_workspace = maker(torch.empty(size, dtype=torch.uint8, device=grad_y.device))
    order = (*range(6, 12), *_ORDER)
    pack, tensors_of = template.pack, present((*conv, *grads, grad_y, grad_final), order)
    stream_of, data_ptr = torch._C._cuda_getCurrentRawStream, torch.Tensor.data_ptr

    def launch(
        conv: Convolution, grad_y: torch.Tensor, grad_final: Optional, grads: Gradients
    ) -> None:
        workspace = make_workspace()
        if grad_y.dtype != dtype:
            grad_y = grad_y.to(dtype)
        call = (stream_of(device), workspace.data_ptr(), size)
        tensors = tensors_of((*conv, *grads, grad_y, grad_final))
        run(pack((*call, *map(data_ptr, tensors))))

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
    flags = _INT64_INDICES * _is_int64(state_indices) + _INT64_POSITIONS * _is_int64(
        state_positions
    )
    results = (*_strided(y), *_strided(residual))
    indices = [0 if one is None else PerCall(0) for one in (state_indices, state_positions)]
    head, problem = call_head(_UPDATE, device), _problem(conv, pool.shape[0], flags)
    pack = Template(_UPDATE, (head, PerCall(0), 0, 0, *results, *indices, *problem)).pack
    given = (*conv, y, residual, state_indices, state_positions)
    tensors_of = present(given, (6, 7, 8, 9, *_ORDER))
    stream_of, data_ptr = torch._C._cuda_getCurrentRawStream, torch.Tensor.data_ptr

    def launch(
        conv: Convolution, residual: Optional, state_indices: Optional, state_positions: Optional,
        y: torch.Tensor,
    ) -> None:  # fmt: skip
        tensors = tensors_of((*conv, y, residual, state_indices, state_positions))
        run(pack((stream_of(device), *map(data_ptr, tensors))))

    return launch


def _problem(
    conv: Convolution, sequences: int | None = None, flags: int = 0
) -> tuple[bytes | int, ...]:
    """The fields of the problem of calls like this one."""
    x, weight, bias, state, cu_seqlens, silu = conv
    flags += _SILU * silu + _INT64_SEQLENS * _is_int64(cu_seqlens)
    sizes = _SIZES.pack(
        *x.shape,
        conv.sequences if sequences is None else sequences,
        conv.width,
        0 if state is None else state.shape[-1],
        DTYPES[NAMES[x.dtype]],
        flags,
    )
    offsets = 0 if cu_seqlens is None else PerCall(cu_seqlens.data_ptr())
    tensors = (field for one in (x, weight, bias, state) for field in _strided(one))
    return (sizes, offsets, *tensors)


def _strided(tensor: Optional) -> tuple[int, bytes]:
    """A flashvar_strided. Dimensions with one entry get stride 0."""
    if tensor is None:
        return 0, _LIKE.pack(0, 0, 0, 0, 0)
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    strides = [stride if size > 1 else 0 for stride, size in pairs]
    like = _LIKE.pack(*(0,) * (3 - len(strides)), *strides, DTYPES[NAMES[tensor.dtype]], 0)
    return PerCall(tensor.data_ptr()), like


def _is_int64(indices: Optional) -> bool:
    return indices is not None and indices.dtype == torch.int64
