"""merge_states in torch's own functions, which have derivatives of every order and kind."""

from __future__ import annotations

import torch

from flashvar.ops.merge_states.problem import LOWEST, Parts


def forward(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged out [batch, seqlen, heads, head_dim] and lse [batch, heads, seqlen]."""
    weights, absent, lse = _weights(parts)
    outs, _ = _each(parts)
    merged = torch.zeros_like(outs[0], dtype=weights.dtype)
    for weight, without, out in zip(weights, absent, outs, strict=True):
        merged = merged + _of_rows(weight) * _present(out.to(weight.dtype), without)
    return merged.to(outs[0].dtype), lse


def backward(
    parts: Parts, grad_out: torch.Tensor, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of outs and lses, stacked."""
    weights, absent, _ = _weights(parts)
    outs, lses = _each(parts)
    wide = grad_out.to(weights.dtype)
    grad_outs = [
        _present(_of_rows(weight) * wide, without)
        for weight, without in zip(weights, absent, strict=True)
    ]
    products = torch.stack(
        [
            (wide * _present(out.to(wide.dtype), without)).sum(-1).transpose(1, 2)
            for out, without in zip(outs, absent, strict=True)
        ]
    )
    delta = (weights * torch.where(absent, 0, products)).sum(0)
    rest = products - delta if grad_lse is None else products - delta + grad_lse
    grad_lses = torch.where(absent, 0, weights * rest)
    return torch.stack(grad_outs).to(grad_out.dtype), grad_lses.to(lses[0].dtype)


def _weights(parts: Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w [parts, batch, heads, seqlen], where parts count for nothing, and lse.

    The largest lse is taken out of the exponents. It is a constant to derivatives: they do not
    depend on it.
    """
    outs, lses = _each(parts)
    wide = torch.promote_types(torch.float32, outs[0].dtype)
    stacked = torch.stack(lses).to(wide)
    base = stacked.detach().amax(0)
    base = torch.where(base == -torch.inf, 0, base)
    absent = (stacked == -torch.inf) | (stacked - base < LOWEST[wide])
    exps = torch.where(absent, 0, torch.exp(torch.where(absent, 0, stacked - base)))
    total = exps.sum(0)
    none = total == 0
    total = torch.where(none, 1, total)
    weights = torch.where(absent, 0, exps / total)
    # A sum of the parts: +inf where one is, and that of one part is its own.
    lse = torch.where(base == torch.inf, base, base + total.log())
    lse = torch.where(none, -torch.inf, lse)
    return weights, absent, lse.to(lses[0].dtype)


def _present(rows: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """Rows [batch, seqlen, heads, ...], 0 where the part counts for nothing."""
    return torch.where(_of_rows(absent), 0, rows)


def _each(parts: Parts) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    if parts.stacked:
        return parts.outs[0].unbind(), parts.lses[0].unbind()
    return parts.outs, parts.lses


def _of_rows(weight: torch.Tensor) -> torch.Tensor:
    """[batch, heads, seqlen] as [batch, seqlen, heads, 1]."""
    return weight.transpose(1, 2).unsqueeze(-1)
