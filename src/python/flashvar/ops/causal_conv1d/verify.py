"""The calls of causal_conv1d that `doctor --verify` checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from flashvar.cli.verify import Case, Tensors
from flashvar.ops.causal_conv1d.api import causal_conv1d, causal_conv1d_update
from flashvar.ops.op import Value

_BATCH, _TOKENS, _CHANNELS, _WIDTH = 2, 131, 72, 4
_ENDS: Final = (0, 50, 131)  # of packed sequences


def cases(dtype: torch.dtype, axes: tuple[Value, ...], random: torch.Generator) -> Iterator[Case]:
    """A whole call, packed sequences, and an update."""
    del axes
    # Of float32 the exponentials are approximations.
    roundings = 64.0 if dtype is torch.float32 else Case.roundings
    kind = f"{dtype}".removeprefix("torch.")

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    weights = {"weight": made(_CHANNELS, _WIDTH), "bias": made(_CHANNELS)}
    state = made(_BATCH, _CHANNELS, _WIDTH - 1)
    whole = {
        "x": made(_BATCH, _TOKENS, _CHANNELS),
        **weights,
        "residual": made(_BATCH, _TOKENS, _CHANNELS),
        "initial_state": state,
    }
    yield Case(f"whole {kind}", whole, _whole, tuple(whole), roundings)
    packed = {"x": made(1, _TOKENS, _CHANNELS), **weights}
    ends = torch.tensor(_ENDS, dtype=torch.int32)
    yield Case(f"packed {kind}", {**packed, "cu_seqlens": ends}, _packed, tuple(packed), roundings)
    token = {"x": made(_BATCH, _CHANNELS), "state": state, **weights}
    yield Case(f"update {kind}", token, _update, (), roundings)


def _whole(given: Tensors) -> tuple[torch.Tensor, ...]:
    return tuple(causal_conv1d(**given, activation="silu", return_final_state=True))


def _packed(given: Tensors) -> tuple[torch.Tensor, ...]:
    y = causal_conv1d(**given)
    assert isinstance(y, torch.Tensor)
    return (y,)


def _update(given: Tensors) -> tuple[torch.Tensor, ...]:
    state = given["state"].clone()
    x, weight, bias = given["x"], given["weight"], given["bias"]
    y = causal_conv1d_update(x, state, weight, bias, activation="silu")
    return y, state
