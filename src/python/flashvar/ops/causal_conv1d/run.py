"""A forward, a backward and an update of causal_conv1d, below autograd and the dispatcher."""

from __future__ import annotations

from typing import TypeAlias, cast

import torch

from flashvar.errors import LayoutError
from flashvar.ops.causal_conv1d.inputs import (
    channels,
    check,
    check_indices,
    check_state_len,
    check_update,
    check_values,
    convolution,
    rows_first,
)
from flashvar.ops.causal_conv1d.problem import Backend, Gradients
from flashvar.ops.causal_conv1d.spec import BACKWARD, FORWARD, UPDATE
from flashvar.ops.serving import serving
from flashvar.selection.candidates import CandidateResult

Optional: TypeAlias = torch.Tensor | None
Four: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    residual: Optional,
    state: Optional,
    cu_seqlens: Optional,
    silu: bool,
    columns: int,
    layout: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the final state, which has `columns`."""
    check(x, weight, bias, residual, state, cu_seqlens, layout)
    if columns:
        check_state_len(columns, weight, state)
    conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
    if conv.cu_seqlens is not None:
        check_values(conv.cu_seqlens, conv.x.shape[1])
    y, final_state = like_forward(x, state, cu_seqlens, columns, layout)
    if y.numel() or final_state.numel():
        chosen, serves = _serving(FORWARD, x, backend)
        of_residual = None if residual is None else rows_first(residual, layout)
        serves.forward(chosen, conv, of_residual, rows_first(y, layout), final_state)
    return y, final_state


def backward(
    grad_y: Optional,
    grad_final: Optional,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    state: Optional,
    cu_seqlens: Optional,
    silu: bool,
    layout: str,
    backend: str,
) -> Four:
    """The gradients of x, weight, bias and state. An absent gradient counts as zeros."""
    check(x, weight, bias, None, state, cu_seqlens, layout)
    found = like_backward(x, weight, bias, state)
    if not x.numel() and not found[3].numel():
        for one in found:
            one.zero_()
        return found
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    chosen, serves = _serving(BACKWARD, x, backend)
    of_x, of_weight, of_bias, of_state = found
    grads = Gradients(
        rows_first(of_x, layout),
        of_weight,
        None if bias is None else of_bias,
        None if state is None else of_state,
    )
    conv = convolution(x, weight, bias, state, cu_seqlens, silu, layout)
    serves.backward(chosen, conv, rows_first(grad_y, layout), grad_final, grads)
    return found


def update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    residual: Optional,
    state_indices: Optional,
    state_positions: Optional,
    silu: bool,
    layout: str,
    backend: str,
) -> torch.Tensor:
    """The output; the state is written."""
    check_update(x, state, weight, bias, residual, state_indices, state_positions, layout)
    if state_indices is not None:
        state_indices = state_indices.contiguous()
        check_indices(state_indices, state.shape[0])
    if torch._debug_has_internal_overlap(state) == 1:
        raise LayoutError(
            f"state must have memory of its own for each element, got strides {state.stride()} of "
            f"{tuple(state.shape)}: make it contiguous first, it is written in place"
        )
    y = torch.empty_like(x)
    if not x.numel():
        return y
    if not state.is_inference():  # so that a backward that kept the state refuses
        torch.autograd.graph.increment_version(state)
    chosen, serves = _serving(UPDATE, x, backend)
    conv = convolution(of_tokens(x, layout), weight, bias, state, None, silu, layout)
    of_residual = None if residual is None else rows_first(of_tokens(residual, layout), layout)
    of_y = rows_first(of_tokens(y, layout), layout)
    if state_positions is not None:
        state_positions = state_positions.contiguous()
    serves.update(chosen, conv, of_residual, state_indices, state_positions, of_y)
    return y


def of_tokens(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A view of [batch, dim] as one token each."""
    return x if x.dim() == 3 else x.unsqueeze(1 if layout == "btd" else 2)


def like_forward(
    x: torch.Tensor, state: Optional, cu_seqlens: Optional, columns: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a forward returns, not yet written."""
    batch = 1 if x.dim() == 2 else x.shape[0]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    like = x if state is None else state
    return torch.empty_like(x), like.new_empty(sequences, channels(x, layout), columns)


def like_backward(x: torch.Tensor, weight: torch.Tensor, bias: Optional, state: Optional) -> Four:
    """What a backward returns, not yet written; of what is absent an empty tensor."""
    return (
        torch.empty_like(x),
        weight.new_empty(weight.shape),
        *(x.new_empty(0) if one is None else one.new_empty(one.shape) for one in (bias, state)),
    )


def _serving(function: str, x: torch.Tensor, backend: str) -> tuple[CandidateResult, Backend]:
    return cast("tuple[CandidateResult, Backend]", serving(function, x, backend))
