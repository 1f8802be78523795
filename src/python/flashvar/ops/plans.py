"""What the plans of all ops share: a cache of them, and prototypes of outputs.

A plan holds what depends on shapes, strides, dtypes, devices and options alone. Programs repeat
calls with the same of these thousands of times.
"""

from __future__ import annotations

from typing import Any, Final

import torch

# Lengths that grow token by token make a new plan each. A full cache is emptied, which is cheap.
PLANS_KEPT: Final = 4096


def keep(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], made: object) -> None:
    """Add a plan to a cache."""
    if len(plans) >= PLANS_KEPT:
        plans.clear()
    plans[key] = made


def prototype(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its memory freed; empty_like of it is the fastest way to allocate.

    Printing it would crash.
    """
    tensor.untyped_storage().resize_(0)
    return tensor
