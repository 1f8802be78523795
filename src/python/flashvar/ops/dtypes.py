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
