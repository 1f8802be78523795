"""Small calls of scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

# Batch, heads, queries, keys, head dim.
B, H, L, S, D = 2, 4, 7, 11, 16


def made(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, **options)


def qkv(lengths: tuple[int, int] = (L, S), heads_kv: int = H) -> tuple[torch.Tensor, ...]:
    shapes = ((B, H, lengths[0], D), (B, heads_kv, lengths[1], D), (B, heads_kv, lengths[1], D))
    return tuple(made(*shape, requires_grad=True) for shape in shapes)


def computed(*tensors: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Output and gradients."""
    wanted = [x for x in (*tensors, options.get("attn_mask")) if x is not None and x.requires_grad]
    out = functional.scaled_dot_product_attention(*tensors, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), wanted)]
