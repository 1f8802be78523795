"""What autocast does to the tensors of flashvar's functions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


def dtype_on(device: str) -> torch.dtype | None:
    """The dtype of autocast on a kind of device; None if autocast is off."""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def as_autocast(tensor: Any) -> Any:
    """A tensor in the dtype of autocast; float64 and numbers that are not floats are kept."""
    dtype = dtype_on(tensor.device.type)
    return tensor if dtype is None else lowered(tensor, dtype)


def lowered(tensor: Any, dtype: torch.dtype) -> Any:
    """A tensor, or None, in the dtype of autocast."""
    if tensor is None or tensor.dtype in (dtype, torch.float64) or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def without_promotion() -> Any:
    """Around torch's cat, stack and index_copy of tensors in any dtype.

    On the CPU autocast of one 16-bit dtype makes them refuse tensors of the other.
    """
    if not torch.is_autocast_enabled("cpu"):
        return nullcontext()
    return torch.autocast("cpu", enabled=False)
