"""The names of dtypes in requests, manifests and messages."""

from __future__ import annotations

from typing import Final

import torch

DTYPES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name."""
    return next(dtype for dtype, known in DTYPES.items() if known == name)
