"""What the log says of a call at debug level, once per kind, and that it costs nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import fakes
import pytest
import torch

import flashvar
from flashvar.binaries import loader
from flashvar.binaries.registry import Binary
from flashvar.ops.attention import plan as attention_plan
from flashvar.ops.attention import trace as attention_trace
from flashvar.ops.attention.problem import Gradients, Inputs, Options
from flashvar.ops.attention.validate import inspect, inspect_backward
from flashvar.ops.plans import Plans
from flashvar.selection.candidates import CandidateResult

KERNEL = fakes.kernel(dtype="bf16", head_dim=64)
BINARY = CandidateResult(
    *("cuda sm_90", "cuda", True, "runs it"), kernel=KERNEL, binary=cast("Binary", object())
)


@pytest.fixture(autouse=True)
def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of earlier tests were made without the log."""
    monkeypatch.setattr(attention_plan, "_plans", Plans())
    monkeypatch.setattr(attention_plan, "_backward_plans", Plans())


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every binary is one that explains a call by the addresses of q and k."""

    def explain(packed: bytes) -> str:
        q, k = (int.from_bytes(packed[at : at + 8], "little") for at in (40, 72))
        return f"wgmma: q {q % 16}, k {k % 16}"

    function = SimpleNamespace(explain=explain, launch=None, workspace=lambda packed: 0)
    found = SimpleNamespace(function=lambda name: function)
    monkeypatch.setattr(loader, "load", lambda binary: found)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)


def aligned(*shape: int, offset: int = 0) -> torch.Tensor:
    """Zeros whose address is a multiple of 64 bytes and, of that, `offset` elements."""
    size = torch.Size(shape).numel()
    memory = torch.zeros(size + 64, dtype=torch.bfloat16)
    start = -(memory.data_ptr() // 2) % 32 + offset
    return memory[start : start + size].view(shape)


def forward(result: CandidateResult, *given: Inputs, options: Options = Options()) -> None:  # noqa: B008
    calls: list[Any] = []
    problem = replace(inspect(given[0], options), device=0)
    launch = attention_trace.logged_forward(
        lambda *arguments: calls.append(arguments), problem, result
    )
    for one in given:
        launch(one, aligned(*problem.out_shape), None)
    assert len(calls) == len(given)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().rpartition(" of 64: ")[2] for record in caplog.records]


def test_a_call_tells_once_what_the_binary_says(caplog: pytest.LogCaptureFixture) -> None:
    q = aligned(2, 32, 4, 64)
    with caplog.at_level(logging.DEBUG, "flashvar"):
        forward(BINARY, Inputs(q, q, q), Inputs(q, q, q))
    assert [record.getMessage() for record in caplog.records] == [
        "attention_fwd bf16, batch 2, 32 queries, 32 keys, 4 heads of 64: cuda sm_90, wgmma: "
        "q 0, k 0"
    ]


def test_the_same_shape_at_another_address_is_another_outcome_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    q = aligned(2, 32, 4, 64)
    moved, as_far = (aligned(2, 32, 4, 64, offset=offset) for offset in (3, 11))
    with caplog.at_level(logging.DEBUG, "flashvar"):
        forward(BINARY, *(Inputs(q, k, q) for k in (q, moved, as_far, q)))
    assert lines(caplog) == ["cuda sm_90, wgmma: q 0, k 0", "cuda sm_90, wgmma: q 0, k 6"]


def test_triton_says_that_it_copies(caplog: pytest.LogCaptureFixture) -> None:
    q, moved = aligned(2, 32, 4, 64), aligned(2, 32, 4, 64, offset=1)
    result = CandidateResult("triton", "triton", True, "runs it")
    with caplog.at_level(logging.DEBUG, "flashvar"):
        forward(result, Inputs(q, q, q), Inputs(moved, q, q))
    first, second = lines(caplog)
    assert first == "triton"
    assert second.startswith("triton, after copies, for rows of q: its address")


def test_a_backward_tells_what_the_binary_says(caplog: pytest.LogCaptureFixture) -> None:
    q, moved = aligned(2, 32, 4, 64), aligned(2, 32, 4, 64, offset=1)
    inputs = Inputs(q, moved, q)
    problem = inspect_backward(inputs, Options(), q, False)
    problem = replace(problem, forward=replace(problem.forward, device=0))
    calls: list[Any] = []
    with caplog.at_level(logging.DEBUG, "flashvar"):
        launch = attention_trace.logged_backward(lambda *call: calls.append(call), problem, BINARY)
        launch(inputs, q, torch.zeros(2, 4, 32), q, None, Gradients(q, q, q))
    assert lines(caplog) == ["cuda sm_90, wgmma: q 0, k 2"]
    assert len(calls) == 1


def test_a_whole_call_is_told_both_ways(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.randn(1, 8, 2, 64, requires_grad=True)
    with caplog.at_level(logging.DEBUG, "flashvar"):
        for _ in range(2):
            flashvar.attention(q, q, q).sum().backward()
    told = [record.getMessage() for record in caplog.records if "queries" in record.getMessage()]
    assert [line.split()[0] for line in told] == ["attention_fwd", "attention_bwd"]


def test_without_the_log_a_launch_is_itself() -> None:
    q = aligned(1, 8, 2, 64)
    problem = inspect_backward(Inputs(q, q, q), Options(), q, False)

    def launch(*arguments: Any) -> None:
        """Nothing."""

    assert attention_trace.logged_forward(launch, problem.forward, BINARY) is launch
    assert attention_trace.logged_backward(launch, problem, BINARY) is launch
