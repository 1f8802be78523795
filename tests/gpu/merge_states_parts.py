"""Partial results for merge_states on a device."""

from __future__ import annotations

import torch
from device_call import DEVICE

Tensors = list[torch.Tensor]


def made(
    parts: int, rows: tuple[int, int, int], head_dim: int, dtype: torch.dtype
) -> tuple[Tensors, Tensors]:
    batch, seqlen, heads = rows
    outs = [
        torch.randn(batch, seqlen, heads, head_dim, device=DEVICE).to(dtype) for _ in range(parts)
    ]
    lses = [4 * torch.randn(batch, heads, seqlen, device=DEVICE) for _ in range(parts)]
    return outs, lses
