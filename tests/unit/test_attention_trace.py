"""What the log says of a call at debug level, once per kind, and that it costs nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import simulated as sim
import torch

import flashvar
from flashvar.ops import attention_plan, attention_trace
from flashvar.ops.attention_inputs import inspect, inspect_backward
from flashvar.ops.attention_problem import Gradients, Inputs, Options
from flashvar.verdicts import Verdict

HOPPER = Verdict(
    "cuda sm_90",
    "cuda",
    True,
    "serves",
    kernel=replace(sim.kernel(dtype="bf16", head_dim=64), family="sm90"),
)
BACK = replace(
    HOPPER,
    kernel=replace(sim.kernel("attention_bwd", dtype="bf16", head_dim=64), family="sm90"),
)


@pytest.fixture(autouse=True)
def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of earlier tests were made without the log."""
    monkeypatch.setattr(attention_plan, "_plans", {})
    monkeypatch.setattr(attention_plan, "_backward_plans", {})


def aligned(*shape: int, offset: int = 0) -> torch.Tensor:
    """Zeros whose address is a multiple of 64 bytes and, of that, `offset` elements."""
    size = torch.Size(shape).numel()
    memory = torch.zeros(size + 64, dtype=torch.bfloat16)
    start = -(memory.data_ptr() // 2) % 32 + offset
    return memory[start : start + size].view(shape)


def forward(verdict: Verdict, *given: Inputs, options: Options = Options()) -> None:  # noqa: B008
    calls: list[Any] = []
    problem = inspect(given[0], options)
    launch = attention_trace.follow_forward(
        lambda *arguments: calls.append(arguments), problem, verdict
    )
    for one in given:
        launch(one, aligned(*problem.out_shape), None)
    assert len(calls) == len(given)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().rpartition(" of 64: ")[2] for record in caplog.records]


def test_a_call_tells_its_family_once(caplog: pytest.LogCaptureFixture) -> None:
    q = aligned(2, 32, 4, 64)
    with caplog.at_level(logging.DEBUG, "flashvar"):
        forward(HOPPER, Inputs(q, q, q), Inputs(q, q, q))
    assert [record.getMessage() for record in caplog.records] == [
        "attention_fwd bf16, batch 2, 32 queries, 32 keys, 4 heads of 64: cuda sm_90, wgmma: "
        "every row starts on 16 bytes, so TMA can address it"
    ]


def test_the_same_shape_at_another_address_is_another_outcome_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    q = aligned(2, 32, 4, 64)
    moved, as_far = (aligned(2, 32, 4, 64, offset=offset) for offset in (3, 11))
    with caplog.at_level(logging.DEBUG, "flashvar"):
        forward(HOPPER, *(Inputs(q, k, q) for k in (q, moved, as_far, q)))
    first, second = lines(caplog)
    assert first.startswith("cuda sm_90, wgmma")
    assert second.startswith("cuda sm_90, mma.sync: TMA cannot address rows of k: its address")


def test_strides_count_too(caplog: pytest.LogCaptureFixture) -> None:
    q = aligned(2, 32, 4, 68)[..., :64]
    with caplog.at_level(logging.DEBUG, "flashvar"):
        forward(HOPPER, Inputs(q, q, q))
    reason = "TMA cannot address rows of q: its heads stride, 68, is no multiple of 8"
    assert lines(caplog) == [f"cuda sm_90, mma.sync: {reason}"]


def test_triton_says_that_it_copies(caplog: pytest.LogCaptureFixture) -> None:
    q, moved = aligned(2, 32, 4, 64), aligned(2, 32, 4, 64, offset=1)
    verdict = Verdict("triton", "triton", True, "serves")
    with caplog.at_level(logging.DEBUG, "flashvar"):
        forward(verdict, Inputs(q, q, q), Inputs(moved, q, q))
    first, second = lines(caplog)
    assert first == "triton"
    assert second.startswith("triton, after copies, for rows of q: its address")


@pytest.mark.parametrize(
    ("options", "extras", "reason"),
    [
        (Options(), {}, "every row"),
        (Options(softcap=2.0), {}, "every row"),
        (Options(deterministic=True), {}, "every row"),
        (Options(dropout_p=0.5), {"rng_state": torch.tensor([1, 2])}, "every row"),
        (Options(), {"bias": torch.zeros(1, 1, 32, 32)}, "a bias"),
        (Options(), {"alibi_slopes": torch.zeros(4)}, "every row"),
        (Options(), {"seqused_k": torch.ones(2, dtype=torch.int32)}, "every row"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_backward_tells_what_stands_in_the_way(
    options: Options,
    extras: dict[str, torch.Tensor],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    q = aligned(2, 32, 4, 64)
    inputs = Inputs(q, q, q, **extras)
    problem = inspect_backward(inputs, options, q, False, False)
    with caplog.at_level(logging.DEBUG, "flashvar"):
        launch = attention_trace.follow_backward(lambda *_: None, problem, BACK)
        launch(inputs, q, torch.zeros(2, 4, 32), q, None, Gradients(q, q, q))
    family = "wgmma" if reason == "every row" else "mma.sync"
    assert lines(caplog)[0].startswith(f"cuda sm_90, {family}: ")
    assert reason in lines(caplog)[0]


def test_a_whole_call_is_told_both_ways(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.randn(1, 8, 2, 64, requires_grad=True)
    with caplog.at_level(logging.DEBUG, "flashvar"):
        for _ in range(2):
            flashvar.attention(q, q, q).sum().backward()
    told = [record.getMessage() for record in caplog.records if "queries" in record.getMessage()]
    assert [line.split()[0] for line in told] == ["attention_fwd", "attention_bwd"]


def test_without_the_log_a_launch_is_itself() -> None:
    q = aligned(1, 8, 2, 64)
    problem = inspect_backward(Inputs(q, q, q), Options(), q, False, False)

    def launch(*arguments: Any) -> None:
        """Nothing."""

    assert attention_trace.follow_forward(launch, problem.forward, HOPPER) is launch
    assert attention_trace.follow_backward(launch, problem, BACK) is launch
