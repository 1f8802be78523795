"""A fused kernel's arithmetic in torch, right or with one mistake: what the budget is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from oracle import Call

Rounding = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype)


def truncated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Toward zero: the bits that do not fit are cut off."""
    lost = {torch.bfloat16: 16, torch.float16: 13}[dtype]
    bits = values.contiguous().view(torch.int32)
    return (bits & -(1 << lost)).view(torch.float32).to(dtype)


@dataclass(frozen=True)
class Mistakes:
    """What a kernel may get wrong; by default nothing."""

    round_weights: Rounding = nearest  # P and dS, before they are multiplied
    round_results: Rounding = nearest
    top_left: bool = False  # the diagonal ends in the first key, not in the last
    wider: int = 0  # keys too many on the left of the window
    forgets_softcap_gradient: bool = False
    forgets_lse_gradient: bool = False
    drops_transposed: bool = False


def run(
    call: Call, grad_out: torch.Tensor, grad_lse: torch.Tensor, mistakes: Mistakes
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Out, log-sum-exp and gradients of a dense call: float32 sums, 16-bit P, dS and results."""
    dtype, group = call.q.dtype, call.q.shape[2] // call.k.shape[2]
    q, d_out = (tensor.transpose(1, 2).float() for tensor in (call.q, grad_out))
    k, v = (t.transpose(1, 2).float().repeat_interleave(group, 1) for t in (call.k, call.v))

    def rounded(weights: torch.Tensor) -> torch.Tensor:
        return mistakes.round_weights(weights, dtype).float()

    def result(values: torch.Tensor) -> torch.Tensor:
        return mistakes.round_results(values, dtype).transpose(1, 2)

    def per_kv_head(values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(1, (-1, group)).sum(2)

    masked = call
    if mistakes.wider:
        masked = replace(call, window=(call.window[0] + mistakes.wider, call.window[1]))
    hidden = masked.hidden()
    if mistakes.top_left:
        hidden = torch.ones_like(hidden).triu(1)
    products = q @ k.mT * call.factor
    scores = call.added(products, torch.float32).masked_fill(hidden, -torch.inf)
    row_max = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - row_max.masked_fill(row_max == -torch.inf, 0.0))
    row_sum = weights.sum(-1, keepdim=True)
    lse = row_max + row_sum.log()
    kept = torch.ones_like(weights)
    if call.dropout_p:
        mask = call.kept().mT if mistakes.drops_transposed else call.kept()
        kept = mask / (1 - call.dropout_p)
    out = rounded(weights * kept) @ v / row_sum.masked_fill(row_sum == 0.0, 1.0)
    out = mistakes.round_results(out, dtype)

    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
    delta = (out.float() * d_out).sum(-1, keepdim=True)
    if not mistakes.forgets_lse_gradient:
        delta = delta - grad_lse[..., None]
    d_scores = weights * (d_out @ v.mT * kept - delta)
    if call.softcap and not mistakes.forgets_softcap_gradient:
        d_scores = d_scores * (1 - torch.tanh(products / call.softcap).square())
    d_scores = rounded(d_scores)
    gradients = {
        "q": result(call.factor * d_scores @ k),
        "k": result(per_kv_head(call.factor * d_scores.mT @ q)),
        "v": result(per_kv_head(rounded(weights * kept).mT @ d_out)),
    }
    return out.transpose(1, 2), lse.squeeze(-1), gradients
