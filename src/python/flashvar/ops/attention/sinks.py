"""Attention sinks outside of the kernels: their gradient, and calls without keys.

A sink is one more score of every row of a head, of a key without a value. With the log-sum-exp that
includes it, its probability in a row is exp(sink - lse), and the gradient of its score is that of
any other: P * (dP - delta), where dP is 0.
"""

from __future__ import annotations

import torch

from flashvar.ops.attention.problem import Inputs


def gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks [heads_q], summed in the dtype of lse in a fixed order.

    `lse` and `delta` are [batch, heads_q, seqlen_q] or [heads_q, total_q]. Rows with lse -inf have
    no sink: they belong to no sequence.
    """
    terms = (sinks.to(lse.dtype)[:, None] - lse).exp_().mul_(delta)
    terms = terms.masked_fill_(lse == -torch.inf, 0.0)
    return terms.sum((0, 2) if lse.dim() == 3 else 1).neg_().to(sinks.dtype)


def fill_without_keys(lse: torch.Tensor, inputs: Inputs) -> None:
    """Write the log-sum-exp of a call without keys: the sink, and -inf in rows of no sequence."""
    if inputs.sinks is None:
        lse.fill_(-torch.inf)
        return
    lse.copy_(inputs.sinks[:, None])
    offsets = inputs.cu_seqlens_q
    if offsets is not None:
        rows = torch.arange(lse.shape[-1], device=lse.device)
        lse.masked_fill_((rows < offsets[0]) | (rows >= offsets[-1]), -torch.inf)
