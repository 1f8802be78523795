"""Formulas of gated_delta_rule for `torch.utils.flop_counter`.

They count the products of the recurrence with a state [K, V], token by token: a forward has three
(what k reads, what is written, what q reads), the backward seven. Kernels by chunks do more.
"""

from __future__ import annotations

from typing import Any

import torch

_FORWARD, _BACKWARD = 3, 7


def forward_flops(_state: Any, q: Any, _k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Operations of gated_delta_rule_fwd."""
    return _FORWARD * _product(q, v)


def update_flops(_pool: Any, _indices: Any, q: Any, _k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Operations of gated_delta_rule_update."""
    return _FORWARD * _product(q, v)


def backward_flops(
    _grad_out: Any, _grad_state: Any, _state: Any, q: Any, _k: Any, v: Any, *_: Any, **__: Any
) -> int:
    """Operations of gated_delta_rule_bwd."""
    return _BACKWARD * _product(q, v)


def _product(q: torch.Tensor, v: torch.Tensor) -> int:
    """The operations of a vector times the state, or of two vectors, for each token and head."""
    count: int = 2 * v.numel() * q.shape[-1]
    return count
