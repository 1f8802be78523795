"""The calls of merge_states that `doctor --verify` checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from flashvar.cli.verify import Case, Tensors
from flashvar.ops.merge_states.api import merge_states
from flashvar.ops.op import Value

_ROWS, _HEADS = 67, 3
_SHAPES: Final = ((2, 128), (7, 72))  # parts, head dim


def cases(dtype: torch.dtype, axes: tuple[Value, ...], random: torch.Generator) -> Iterator[Case]:
    """Few and many parts."""
    del axes
    # Of float32 the exponentials are approximations.
    roundings = 64.0 if dtype is torch.float32 else Case.roundings
    for parts, head_dim in _SHAPES:
        outs = torch.randn(parts, 2, _ROWS, _HEADS, head_dim, generator=random).to(dtype)
        lses = torch.randn(parts, 2, _HEADS, _ROWS, generator=random)
        name = f"{parts} parts {dtype}".replace("torch.", "")
        yield Case(name, {"outs": outs, "lses": lses}, _merge, ("outs", "lses"), roundings)


def _merge(given: Tensors) -> tuple[torch.Tensor, ...]:
    return merge_states(given["outs"], given["lses"])
