"""causal_conv1d in plain torch operations: float32 throughout, float64 for float64 inputs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from flashvar.backends.reference.causal_conv1d import formula

if TYPE_CHECKING:
    from flashvar.ops.causal_conv1d.problem import (
        BackwardLaunch,
        Convolution,
        ForwardLaunch,
        Gradients,
        UpdateLaunch,
    )
    from flashvar.selection.candidates import CandidateResult


def prepare_forward(chosen: CandidateResult, *like: object) -> ForwardLaunch:
    """The launch that writes the output and the final state."""
    return partial(forward, chosen)


def prepare_backward(chosen: CandidateResult, *like: object) -> BackwardLaunch:
    """The launch that writes the gradients."""
    return partial(backward, chosen)


def prepare_update(chosen: CandidateResult, *like: object) -> UpdateLaunch:
    """The launch that writes the output, and moves the tokens of x into the state."""
    return partial(update, chosen)


def forward(
    chosen: CandidateResult,
    conv: Convolution,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    final_state: torch.Tensor,
) -> None:
    """Write the output and the final state."""
    found, final = formula.forward(conv, residual, final_state.shape[-1])
    y.copy_(found)
    final_state.copy_(final)


def backward(
    chosen: CandidateResult,
    conv: Convolution,
    grad_y: torch.Tensor,
    grad_final: torch.Tensor | None,
    grads: Gradients,
) -> None:
    """Write the gradients."""
    found = formula.backward(conv, grad_y, grad_final)
    for target, one in zip((grads.x, grads.weight, grads.bias, grads.state), found, strict=True):
        if target is not None:
            target.copy_(one)


def update(
    chosen: CandidateResult,
    conv: Convolution,
    residual: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    state_positions: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Write the output, and move the tokens of x into the state."""
    pool = conv.state
    assert pool is not None
    if state_indices is None:
        found, final = _moved(conv, residual, state_positions)
        y.copy_(found)
        pool.copy_(final)
        return
    inside = (state_indices >= 0) & (state_indices < pool.shape[0])
    slots = torch.where(inside, state_indices, 0).long()
    if pool.shape[0] == 0:
        gathered = pool.new_zeros(slots.shape[0], *pool.shape[1:])
    else:
        gathered = pool[slots]
    found, final = _moved(conv._replace(state=gathered), residual, state_positions)
    outside = torch.where(state_indices < 0, 0.0, torch.nan).to(found.dtype)[:, None, None]
    y.copy_(torch.where(inside[:, None, None], found, outside))
    pool[slots[inside]] = final[inside]


def _moved(
    conv: Convolution, residual: torch.Tensor | None, positions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the states after it, which are circular where there are positions."""
    state = conv.state
    assert state is not None
    columns = state.shape[-1]
    if positions is None:
        return formula.forward(conv, residual, columns)
    ordered = conv._replace(state=_rotated(state, positions))
    found, final = formula.forward(ordered, residual, columns)
    return found, _rotated(final, -(positions.long() + conv.x.shape[1]))


def _rotated(state: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """States whose column c is column (c + by) % columns of `state`; `by`: for each state."""
    column = torch.arange(state.shape[-1], device=state.device)
    source = (column + by.long()[:, None]) % state.shape[-1]
    return state.gather(2, source[:, None].expand(state.shape))
