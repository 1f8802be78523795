"""What torch.profiler shows of calls that skip the dispatcher: the events that it would make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import flashvar


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def attention(**leaves: Any) -> Any:
    return flashvar.attention(**leaves)


def merge(**leaves: Any) -> Any:
    outs, lses = list(leaves["outs"]), list(leaves["lses"])
    return flashvar.merge_states(outs, lses)[0]


def delta_rule(**leaves: Any) -> Any:
    return flashvar.gated_delta_rule(**leaves, g=None)[0]


def update(**leaves: Any) -> Any:
    pool, places = torch.zeros(3, 2, 4, 4), torch.tensor([0, 2])
    given = {name: x.detach() for name, x in leaves.items()}
    return flashvar.gated_delta_rule(**given, g=None, initial_state=pool, state_indices=places)[0]


def conv_update(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return flashvar.causal_conv1d_update(x.detach(), torch.zeros(2, 6, 3), weight.detach())


ROWS = {name: leaf(2, 3, 2, 4) for name in "qkv"}
RULE = {**ROWS, "beta": torch.rand(2, 3, 2)}
PARTS = {"outs": leaf(2, 2, 3, 2, 4), "lses": leaf(2, 2, 2, 3)}
CONV = {"x": leaf(2, 5, 6), "weight": leaf(6, 3)}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
    "attention_fwd": (attention, ROWS),
    "merge_states_fwd": (merge, PARTS),
    "gated_delta_rule_fwd": (delta_rule, RULE),
    "gated_delta_rule_update": (update, RULE),
    "causal_conv1d_fwd": (flashvar.causal_conv1d, CONV),
    "causal_conv1d_update": (conv_update, CONV),
}


@pytest.mark.parametrize("differentiated", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("function", CALLS)
def test_events(function: str, differentiated: bool) -> None:
    """One for each call, and for each backward."""
    call, given = CALLS[function]
    training = differentiated and function.endswith("_fwd")
    with torch.set_grad_enabled(differentiated):
        call(**given)  # the first of a kind goes through the dispatcher
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(2):
                out = call(**given)
                if training:
                    out.sum().backward()
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts.get(f"flashvar::{function}") == 2
    backward = f"flashvar::{function.removesuffix('_fwd')}_bwd"
    assert counts.get(backward) == (2 if training else None)


def test_nothing_is_recorded_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(torch._C._profiler, "_RecordFunctionFast", unexpected)
    for call, given in CALLS.values():
        for _ in range(2):
            call(**given)
