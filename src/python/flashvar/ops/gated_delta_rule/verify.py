"""The calls of gated_delta_rule that `doctor --verify` checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from flashvar.cli.verify import Case, Tensors
from flashvar.ops.gated_delta_rule.api import gated_delta_rule
from flashvar.ops.op import Value

_TOKENS: Final = 200  # of no whole chunk
_HEADS, _HEADS_V = 2, 4
_ENDS: Final = (0, 77, 200)  # of packed sequences


def cases(dtype: torch.dtype, axes: tuple[Value, ...], random: torch.Generator) -> Iterator[Case]:
    """Whole sequences with a state, packed ones, and one token with a state."""
    (dims,) = axes
    assert not isinstance(dims, str)
    dim = dims[0]
    kind = f"{dtype}".removeprefix("torch.") + f" {dim}"

    def made(batch: int, tokens: int) -> dict[str, torch.Tensor]:
        def of_heads(heads: int) -> torch.Tensor:
            return torch.randn(batch, tokens, heads, dim, generator=random).to(dtype)

        return {
            "q": of_heads(_HEADS),
            "k": of_heads(_HEADS),
            "v": of_heads(_HEADS_V),
            "g": -torch.rand(batch, tokens, _HEADS_V, generator=random) / 8,
            "beta": torch.rand(batch, tokens, _HEADS_V, generator=random).to(dtype),
        }

    state = torch.randn(2, _HEADS_V, dim, dim, generator=random)
    whole = {**made(2, _TOKENS), "initial_state": state}
    yield Case(f"whole {kind}", whole, _rule, tuple(whole), 32.0)
    packed = made(1, _TOKENS)
    ends = torch.tensor(_ENDS, dtype=torch.int32)
    yield Case(f"packed {kind}", {**packed, "cu_seqlens": ends}, _rule, tuple(packed), 32.0)
    yield Case(f"one token {kind}", {**made(2, 1), "initial_state": state}, _rule, (), 32.0)


def _rule(given: Tensors) -> tuple[torch.Tensor, ...]:
    out, state = gated_delta_rule(**given, qk_l2norm=True, return_final_state=True)
    assert state is not None
    return out, state
