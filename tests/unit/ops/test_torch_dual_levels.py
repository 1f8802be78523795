"""Tangents at dual levels that graphs of torch.compile enter, and forward_ad does not know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import flashvar
from flashvar.compat.flash_attn.layers.rotary import apply_rotary_emb
from flashvar.errors import BackendUnavailableError
from flashvar.layers.norms import rms_norm
from flashvar.ops import derivatives

# Torch's own formulas of tangents.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

Call = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derivatives, "_graphs_enter_levels", False)
    torch._dynamo.reset()


def made(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FILTERS, WEIGHT = made(32, 4, seed=2), made(32, seed=2)
LSES = made(2, 1, 1, 4, seed=2)
TABLES: Any = made(8, 16, seed=2), made(8, 16, seed=3)


def convolved(x: torch.Tensor) -> torch.Tensor:
    return flashvar.causal_conv1d(x, FILTERS, activation="silu")


def merged(x: torch.Tensor) -> torch.Tensor:
    return flashvar.merge_states(list(x.view(2, 1, 4, 1, 64)), list(LSES))[0]


def normalized(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = rms_norm(x, WEIGHT, None)
    return out


def rotated(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = apply_rotary_emb(x.view(2, 8, 1, 32), *TABLES)
    return out


def tangent_of(call: Call) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    def tangent(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor | None:
        with forward_ad.dual_level():
            found: Any = forward_ad.unpack_dual(call(forward_ad.make_dual(x, given)))
            return found.tangent

    return tangent


@pytest.mark.parametrize(
    "call", [convolved, merged, normalized, rotated], ids=lambda call: call.__name__
)
def test_tangents_are_kept(call: Call) -> None:
    given = made(2, 8, 32), made(2, 8, 32, seed=4)
    tangent = tangent_of(call)
    expected = tangent(*given)
    assert expected is not None
    compiled = torch.compile(tangent, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(*given), expected)


def test_a_call_without_a_derivative_is_refused() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return flashvar.attention(x, x.detach(), x.detach())

    compiled = torch.compile(tangent_of(attend), backend="eager", fullgraph=True)
    x = made(1, 8, 2, 16)
    try:
        with pytest.raises(BackendUnavailableError, match="no forward-mode derivative"):
            compiled(x, x)
    finally:
        with suppress(RuntimeError):  # the graph has left its level
            torch._C._exit_dual_level(level=0)
