"""causal_conv1d in plain torch operations: float32 throughout, float64 for float64 inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from flashvar.backends.reference.causal_conv1d import formula

if TYPE_CHECKING:
    from flashvar.ops.causal_conv1d.problem import Convolution, Gradients
    from flashvar.selection.candidates import CandidateResult


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
    y: torch.Tensor,
) -> None:
    """Write the output, and move the tokens of x into the state."""
    pool = conv.state
    assert pool is not None
    columns = pool.shape[-1]
    if state_indices is None:
        found, final = formula.forward(conv, residual, columns)
        y.copy_(found)
        pool.copy_(final)
        return
    inside = (state_indices >= 0) & (state_indices < pool.shape[0])
    slots = torch.where(inside, state_indices, 0).long()
    if pool.shape[0] == 0:
        gathered = pool.new_zeros(slots.shape[0], *pool.shape[1:])
    else:
        gathered = pool[slots]
    found, final = formula.forward(replace(conv, state=gathered), residual, columns)
    outside = torch.where(state_indices < 0, 0.0, torch.nan).to(found.dtype)[:, None, None]
    y.copy_(torch.where(inside[:, None, None], found, outside))
    pool[slots[inside]] = final[inside]
