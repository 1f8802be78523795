"""gated_delta_rule through a compiled binary: the C structs of `gated_delta_rule.h`."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import torch

from flashvar.backends.cuda.call import CALL, DTYPES, TENSOR, call_head, function_of
from flashvar.ops.dtypes import DTYPES as NAMES
from flashvar.ops.gated_delta_rule.spec import FORWARD

if TYPE_CHECKING:
    from flashvar.ops.gated_delta_rule.problem import Inputs
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
_QK_L2NORM, _BETA_SIGMOID, _NEGATIVE_EIGVAL = 1, 2, 4
_NO_GATE: Final = (0, 0, 0, 0, DTYPES["fp32"], 0)
_NO_STATE: Final = (0, 0, 0, 0, 0)


def forward(
    chosen: CandidateResult,
    inputs: Inputs,
    initial_state: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
) -> None:
    """Write out, and the state after each sequence."""
    function, device = function_of(FORWARD, chosen, out.device.index)
    cu_seqlens = inputs.cu_seqlens
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int32)
    tail = (
        *_tensor(out),
        *_state(final_state),
        *_problem(inputs, cu_seqlens, initial_state),
    )
    head = call_head(_FORWARD, device), torch._C._cuda_getCurrentRawStream(device)
    size = function.workspace(_FORWARD.pack(*head, 0, 0, *tail))
    workspace = torch.empty(size, dtype=torch.uint8, device=out.device)
    function.launch(_FORWARD.pack(*head, workspace.data_ptr(), size, *tail))


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
    """A flashvar_tensor. The stride of a dimension with one entry says nothing."""
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
