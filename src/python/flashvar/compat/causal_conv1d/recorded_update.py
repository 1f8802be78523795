"""An update of a convolution's states that autograd may have recorded."""

from __future__ import annotations

from typing import Any

import torch

from flashvar.ops.causal_conv1d import api

__all__ = ["update"]


def update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Any,
    *,
    layout: Any,
    residual: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    state_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """As flashvar.causal_conv1d_update, with derivatives where autograd recorded the state.

    Models that decode outside torch.no_grad() have such states. A pool and circular buffers are
    refused there, and so is a state that is a leaf.
    """
    addressed = state_indices is not None or state_positions is not None
    if addressed or not _is_recorded(state):
        return api.causal_conv1d_update(
            x,
            state,
            weight,
            bias,
            activation=activation,
            residual=residual,
            state_indices=state_indices,
            state_positions=state_positions,
            layout=layout,
        )
    axis = 1 if layout == "btd" else 2
    one_token = x.dim() == 2
    if one_token:
        x = x.unsqueeze(axis)
        residual = None if residual is None else residual.unsqueeze(axis)
    y, after = api.causal_conv1d(
        x,
        weight,
        bias,
        activation=activation,
        residual=residual,
        initial_state=state.clone(),  # the backward reads it, and the state is written
        return_final_state=True,
        layout=layout,
    )
    state.copy_(after)
    return y.squeeze(axis) if one_token else y


def _is_recorded(state: Any) -> bool:
    """Whether autograd recorded the operations that made a state."""
    return (
        torch.is_grad_enabled()
        and isinstance(state, torch.Tensor)
        and state.requires_grad
        and not state.is_leaf
    )
