"""Small tensors for calls of scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch

# Batch, heads, queries, keys, head dim.
B, H, L, S, D = 2, 4, 7, 11, 16


def made(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, **options)


def qkv(lengths: tuple[int, int] = (L, S), heads_kv: int = H) -> tuple[torch.Tensor, ...]:
    shapes = ((B, H, lengths[0], D), (B, heads_kv, lengths[1], D), (B, heads_kv, lengths[1], D))
    return tuple(made(*shape, requires_grad=True) for shape in shapes)
