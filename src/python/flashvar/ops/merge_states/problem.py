"""What a call of merge_states is, as backends see it.

With lse = log(sum(exp(lses[i]))) and w[i] = exp(lses[i] - lse),

    out = sum(w[i] * outs[i])
    grad_outs[i] = w[i] * grad_out
    grad_lses[i] = w[i] * (grad_out . (outs[i] - out) + grad_lse)

A part with w[i] = 0 counts for nothing, whatever outs[i] holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Problem:
    """Everything about a call but its data."""

    dtype: str  # of outs: "bf16", "fp16", "fp32" or "fp64"
    device: int | None  # CUDA ordinal; None is the CPU
    parts: int
    batch: int
    seqlen: int
    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of a call as views in one order, whatever layout the user keeps.

    Each tuple has a tensor for each part, or one tensor with the parts in front, `stacked`.
    """

    outs: tuple[torch.Tensor, ...]  # [batch, seqlen, heads, head_dim], any strides
    lses: tuple[torch.Tensor, ...]  # [batch, heads, seqlen]; float32, or float64 beside float64
    stacked: bool

    def as_stacked(self) -> Parts:
        """The same parts in one tensor each: copies of them, unless they are stacked."""
        if self.stacked:
            return self
        return Parts((torch.stack(self.outs),), (torch.stack(self.lses),), True)
