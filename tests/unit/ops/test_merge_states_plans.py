"""Plans of merge_states: one for each kind of call, and none for another kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashvar.ops.merge_states import run
from flashvar.ops.plans import Plans

PLAIN = (False, "bshd", "auto")


def made(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape) for _ in range(2)]


def moved(x: torch.Tensor) -> torch.Tensor:
    """The same values in other strides."""
    return torch.stack((x, x), 1)[:, 0]


def every_one_moved(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors, one of them moved at a time."""
    return [
        [moved(x) if place == chosen else x for place, x in enumerate(tensors)]
        for chosen in range(len(tensors))
    ]


def check(plans: Plans[Any], function: Any, calls: list[tuple[Any, ...]]) -> None:
    """Each call makes one plan when it is first made, and has the results of its own."""
    found = []
    for count, call in enumerate(calls, 1):
        found.append([function(*call) for _ in range(2)])
        assert len(plans) == count
    for call, twice in zip(calls, found, strict=True):
        plans.clear()
        alone = function(*call)
        for one in twice:
            torch.testing.assert_close(one, alone, rtol=0, atol=0)


def test_what_a_plan_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: Plans[Any] = Plans()
    monkeypatch.setattr(run, "_plans", plans)
    outs, lses = made(2, 5, 4, 8), made(2, 4, 5)
    calls: list[tuple[Any, ...]] = [
        (outs, lses, *PLAIN),
        *((outs, sums, *PLAIN) for sums in every_one_moved(lses)),
        *((parts, lses, *PLAIN) for parts in every_one_moved(outs)),
        (made(2, 4, 5, 8), lses, False, "bhsd", "auto"),
        (outs, lses, False, "bshd", "reference"),
        ([torch.stack(outs)], [torch.stack(lses)], True, "bshd", "auto"),
        ([x.half() for x in outs], lses, *PLAIN),
    ]
    check(plans, run.forward, calls)


def test_what_a_plan_of_a_backward_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: Plans[Any] = Plans()
    monkeypatch.setattr(run, "_backward_plans", plans)
    outs, lses = made(2, 5, 4, 8), made(2, 4, 5)
    grad_out, grad_lse = torch.randn(2, 5, 4, 8), torch.randn(2, 4, 5)
    calls: list[tuple[Any, ...]] = [
        (grad_out, grad_lse, outs, lses, *PLAIN),
        (grad_out, None, outs, lses, *PLAIN),
        (moved(grad_out), grad_lse, outs, lses, *PLAIN),
        *((grad_out, grad_lse, outs, sums, *PLAIN) for sums in every_one_moved(lses)),
        *((grad_out, grad_lse, parts, lses, *PLAIN) for parts in every_one_moved(outs)),
        (grad_out, grad_lse, outs, lses, *PLAIN, (True, False, True, True)),
    ]
    check(plans, run.backward, calls)
