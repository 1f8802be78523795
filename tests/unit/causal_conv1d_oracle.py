"""causal_conv1d in float64, one token and tap at a time: what every backend is compared with."""

from __future__ import annotations

from itertools import pairwise

import torch


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    silu: bool = False,
    columns: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [seqlen, dim] and the final state [dim, columns] of one sequence x [seqlen, dim]."""
    seqlen, dim = x.shape
    width = weight.shape[1]

    def token(t: int) -> torch.Tensor:
        if t >= 0:
            return x[t].double()
        if state is not None and state.shape[1] + t >= 0:
            return state[:, state.shape[1] + t].double()
        return x.new_zeros(dim, dtype=torch.float64)

    rows = []
    for t in range(seqlen):
        z = x.new_zeros(dim, dtype=torch.float64) if bias is None else bias.double()
        for back in range(width):
            z = z + weight[:, width - 1 - back].double() * token(t - back)
        y = z / (1 + torch.exp(-z)) if silu else z
        rows.append(y if residual is None else y + residual[t].double())
    y = torch.stack(rows) if rows else x.double()
    kept = [token(seqlen - columns + c) for c in range(columns)]
    final = torch.stack(kept, 1) if kept else x.new_zeros(dim, 0, dtype=torch.float64)
    return y, final


def packed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    state: torch.Tensor | None,
    ends: list[int],
    silu: bool,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [total, dim] and the final states [sequences, dim, columns] of packed x [total, dim]."""
    found = [
        convolved(
            x[a:b],
            weight,
            bias,
            None if residual is None else residual[a:b],
            None if state is None else state[i],
            silu,
            columns,
        )
        for i, (a, b) in enumerate(pairwise(ends))
    ]
    return torch.cat([y for y, _ in found]), torch.stack([final for _, final in found])
