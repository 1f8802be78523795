"""What the log says, at debug level, of calls that go through a binary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flashvar.backends.cuda import call, causal_conv1d, gated_delta_rule, merge_states
from flashvar.binaries import loader
from flashvar.binaries.registry import Binary
from flashvar.ops.causal_conv1d.problem import Convolution
from flashvar.ops.causal_conv1d.problem import Gradients as ConvGradients
from flashvar.ops.gated_delta_rule.problem import Inputs
from flashvar.ops.merge_states.problem import Parts
from flashvar.selection.candidates import CandidateResult

CHOSEN = CandidateResult("cuda sm_90", "cuda", True, "", binary=cast("Binary", object()))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the functions that a library launches, which says how many of them there were."""
    collected: list[str] = []

    def function(name: str) -> Any:
        return SimpleNamespace(
            launch=lambda packed: collected.append(name),
            workspace=lambda packed: 0,
            explain=lambda packed: "simt: 16 bytes at a time",
        )

    monkeypatch.setattr(loader, "load", lambda binary: SimpleNamespace(function=function))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    for backend in (causal_conv1d, gated_delta_rule, merge_states):
        monkeypatch.setattr(
            backend, "function_of", lambda name, chosen, device: call.function_of(name, chosen, 0)
        )
    monkeypatch.setattr(call, "_logged", set())
    return collected


def of_causal_conv1d(function: str) -> None:
    x, state = torch.zeros(2, 5, 8).half(), torch.zeros(2, 8, 3).half()
    conv = Convolution(x, torch.zeros(8, 4).half(), None, state, None, True)
    if function == "fwd":
        launch: Callable[..., None] = causal_conv1d.prepare_forward(CHOSEN, conv, None, x, state)
        launch(conv, None, x, state)
    elif function == "bwd":
        grads = ConvGradients(x, conv.weight, None, state)
        launch = causal_conv1d.prepare_backward(CHOSEN, conv, x, None, grads)
        launch(conv, x, None, grads)
    else:
        launch = causal_conv1d.prepare_update(CHOSEN, conv, None, None, None, x)
        launch(conv, None, None, None, x)


def of_gated_delta_rule(function: str) -> None:
    q, v = torch.zeros(2, 5, 2, 8).half(), torch.zeros(2, 5, 2, 16).half()
    beta, state = torch.zeros(2, 5, 2), torch.zeros(2, 2, 8, 16)
    inputs = Inputs(q, q, v, None, beta, None, None, None, 1.0, False, False, False)
    if function == "bwd":
        back = gated_delta_rule.prepare_backward(CHOSEN, inputs, state, v, None)
        back((v, None, state, *inputs[:8]))
        return
    if function == "fwd":
        launch = gated_delta_rule.prepare_forward(CHOSEN, inputs, state, v, state)
    else:
        launch = gated_delta_rule.prepare_update(CHOSEN, inputs, state, None, v, state)
    launch((*inputs[:8], state, None), v, state)


def of_merge_states(function: str) -> None:
    out, lse = torch.zeros(2, 5, 4, 16).half(), torch.zeros(2, 4, 5)
    parts = Parts((out, out), (lse, lse), False)
    if function == "fwd":
        merge_states.prepare_forward(CHOSEN, parts, out, lse)(parts, out, lse)
    else:
        grads = torch.stack([out, out]), torch.stack([lse, lse])
        launch = merge_states.prepare_backward(CHOSEN, parts, out, lse, *grads, 0)
        launch(parts, out, lse, *grads)


CALLS = [
    *((of_causal_conv1d, function) for function in ("fwd", "bwd", "update")),
    *((of_gated_delta_rule, function) for function in ("fwd", "bwd", "update")),
    *((of_merge_states, function) for function in ("fwd", "bwd")),
]


@pytest.mark.parametrize(("run", "function"), CALLS)
def test_a_kind_of_calls_is_told_once(
    run: Callable[[str], None], function: str, launched: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{run.__name__.removeprefix('of_')}_{function}"
    with caplog.at_level(logging.DEBUG, "flashvar"):
        run(function)
        run(function)
    assert launched == [name] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}: cuda sm_90, simt: 16 bytes at a time"
    ]


@pytest.mark.parametrize(("run", "function"), CALLS)
def test_without_the_log_nothing_is_asked(
    run: Callable[[str], None], function: str, launched: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flashvar"):
        run(function)
    assert len(launched) == 1
    assert not caplog.records
