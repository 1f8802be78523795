"""merge_states in float64, one row at a time: what every backend is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def merged(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Out [..., head_dim] and lse of rows, and the weights with the parts in front.

    `outs` are [..., head_dim] and `lses` [...], in one order.
    """
    rows = torch.stack([lse.double() for lse in lses]).flatten(1)
    weights = torch.zeros_like(rows)
    lse = torch.empty_like(rows[0])
    for row in range(rows.shape[1]):
        values = rows[:, row].tolist()
        if any(math.isnan(value) for value in values):
            lse[row], high = math.nan, math.nan
        else:
            high = max(values)
            lse[row] = high
        if math.isinf(high) and high < 0:
            continue
        exps = [_exp(value, high) for value in values]
        total = math.fsum(exps)
        if math.isfinite(high):
            lse[row] = high + math.log(total)
        shares = [0.0 if one == 0 else one / total for one in exps]
        weights[:, row] = torch.tensor(shares, dtype=torch.float64)
    weights = weights.unflatten(1, lses[0].shape) if lses[0].dim() else weights
    out = torch.zeros_like(outs[0], dtype=torch.float64)
    for weight, part in zip(weights, outs, strict=True):
        w = weight.unsqueeze(-1).to(part.device)
        out += torch.where(w == 0, 0, w * part.double())
    return out, lse.unflatten(0, lses[0].shape).to(out.device), weights


def gradients(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those of every out and lse, in the order of `merged`."""
    out, _, weights = merged(outs, lses)
    weights = weights.to(out.device)
    of_outs, of_lses = [], []
    for weight, part in zip(weights, outs, strict=True):
        w = weight.unsqueeze(-1)
        of_outs.append(torch.where(w == 0, 0, w * grad_out.double()))
        rest = (grad_out.double() * (part.double() - out)).sum(-1) + grad_lse.double()
        of_lses.append(torch.where(weight == 0, 0, weight * rest))
    return of_outs, of_lses


def _exp(value: float, high: float) -> float:
    if math.isinf(value) and value < 0:
        return 0.0
    if math.isinf(high) and not math.isinf(value):
        return 0.0
    return math.exp(value - high) if math.isfinite(value - high) else math.nan
