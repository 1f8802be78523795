"""Arguments of calls of merge_states."""

from __future__ import annotations

from typing import Any

import torch

Tensors = list[torch.Tensor]


def made(
    parts: int = 3, head_dim: int = 8, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensors, Tensors]:
    """Outs [2, 5, 4, head_dim] and lses [2, 4, 5]."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    outs = [torch.randn(2, 5, 4, head_dim).to(dtype) for _ in range(parts)]
    lses = [4 * torch.randn(2, 4, 5, dtype=wide) for _ in range(parts)]
    for one in (*outs, *lses):
        one.requires_grad_(options.get("grad", False))
    return outs, lses


def rows(lses: Tensors) -> Tensors:
    """In the order of outs."""
    return [lse.transpose(1, 2) for lse in lses]
