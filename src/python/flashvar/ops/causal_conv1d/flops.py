"""Formulas of causal_conv1d for `torch.utils.flop_counter`.

They count the products with the filters, as torch does of its own convolutions: a forward has one
for each element of x and column of the weight, a backward two.
"""

from __future__ import annotations

from typing import Any


def forward_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Operations of causal_conv1d_fwd."""
    return _product(x, weight)


def update_flops(x: Any, _state: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Operations of causal_conv1d_update."""
    return _product(x, weight)


def backward_flops(_grad_y: Any, _grad_final: Any, x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Operations of causal_conv1d_bwd."""
    return 2 * _product(x, weight)


def _product(x: Any, weight: Any) -> int:
    count: int = 2 * x.numel() * weight.shape[1]
    return count
