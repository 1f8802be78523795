"""Plans of causal_conv1d: calls that repeat are found by one check, with the same results."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from flashvar import causal_conv1d, causal_conv1d_update
from flashvar.errors import BackendUnavailableError, InvalidInputError
from flashvar.ops import backend_choice
from flashvar.ops.causal_conv1d import api, run
from flashvar.ops.plans import Plans
from flashvar.selection import resolve
from flashvar.selection.candidates import CandidateResult


class Text(str):
    """Equal to a str, with its hash."""


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No plans yet; an entry for each call whose arguments were checked one by one."""
    torch.manual_seed(0)
    for name in ("_plans", "_backward_plans", "_update_plans"):
        monkeypatch.setattr(run, name, Plans())
    real, calls = api._are_plain, []

    def counted(*tensors: Any) -> bool:
        calls.append(len(tensors))
        return real(*tensors)

    monkeypatch.setattr(api, "_are_plain", counted)
    return calls


def made(**changes: Any) -> dict[str, Any]:
    given = {
        "x": torch.randn(2, 6, 8),
        "weight": torch.randn(8, 4),
        "bias": torch.randn(8),
        "activation": "silu",
        "initial_state": torch.randn(2, 8, 3),
        "return_final_state": True,
    }
    return {**given, **changes}


@pytest.mark.parametrize("wanted", [True, False], ids=["with state", "without"])
def test_a_forward_that_repeats(wanted: bool, checked: list[int]) -> None:
    given = made(return_final_state=wanted)
    first, second = (causal_conv1d(**given) for _ in range(2))
    assert len(checked) == 1
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_residual_that_is_x_itself(checked: list[int]) -> None:
    given, x = made(), torch.randn(2, 6, 8)
    given["x"] = x
    calls = [{**given, "residual": one} for one in (x, x, x.clone(), None)]
    (y, _), *others = (causal_conv1d(**call) for call in calls)
    assert len(checked) == 3
    assert torch.equal(others[0][0], y)
    assert torch.equal(others[1][0], y)
    torch.testing.assert_close(others[2][0] + x, y)
    token, weight, states = x[:, 0], given["weight"], given["initial_state"]
    first, second = (
        causal_conv1d_update(token, states.clone(), weight, residual=token) for _ in range(2)
    )
    assert len(checked) == 4
    assert torch.equal(first, second)


def test_an_update_that_repeats(checked: list[int]) -> None:
    x, weight, states = torch.randn(2, 8), torch.randn(8, 4), torch.randn(2, 8, 3)
    pools = [states.clone(), states.clone()]
    first, second = (causal_conv1d_update(x, pool, weight) for pool in pools)
    assert len(checked) == 1
    assert torch.equal(first, second)
    assert torch.equal(*pools)
    assert not torch.equal(pools[0], states)


def test_gradients_of_calls_that_repeat(checked: list[int]) -> None:
    given, found = made(), []
    for _ in range(3):
        leaves = [given[name].clone().requires_grad_() for name in ("x", "weight", "bias")]
        y, final = causal_conv1d(*leaves, **{n: given[n] for n in list(given)[3:]})
        found.append(torch.autograd.grad(y.sin().sum() + final.cos().sum(), leaves))
    assert len(checked) == 1
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)


def test_gradients_of_other_addresses() -> None:
    """Rows of x, or of the gradient, that start elsewhere are another plan: of its workspace."""
    x, weight = torch.randn(2, 6, 8), torch.randn(8, 4)
    room = torch.empty(x.numel() + 1)
    shifted = room[1:].view(x.shape).copy_(x)
    pairs = [(x, x), (x, x), (shifted, x), (x, shifted), (shifted, x), (shifted, shifted)]
    grads, plans = [], []
    for grad_y, of in pairs:
        given = (grad_y, None, of, weight, None, None, None)
        grads.append(run.gradients(given, (True, "btd", "auto")))
        plans.append(run.known_backward(given, (True, "btd", "auto")))
    assert len(run._backward_plans) == 4
    assert plans[0] is plans[1] is not None
    for (grad_y, of), plan in zip(pairs, plans, strict=True):
        assert plan is None or plan.alignment == (of.data_ptr() % 16, grad_y.data_ptr() % 16)
    for one in grads:
        assert one[2] is one[3] is None
        torch.testing.assert_close(one[:2], grads[0][:2])


def test_what_is_refused_after_a_call_that_is_not() -> None:
    given = made(state_len=3)
    causal_conv1d(**given)
    changes: list[dict[str, Any]] = [
        {"return_final_state": 1},
        {"return_final_state": numpy.True_},
        {"state_len": 3.0},
        {"activation": Text("silu")},
        {"activation": ["silu"]},
        {"layout": Text("btd")},
        {"layout": "bdt"},
        {"backend": Text("auto")},
        {"bias": given["bias"].to_sparse()},
        {"bias": given["bias"].tolist()},
        {"x": given["x"][:, :, :4]},
    ]
    for change in changes:
        for _ in range(2):
            with pytest.raises(InvalidInputError):
                causal_conv1d(**{**given, **change})


def test_offsets_are_checked_at_every_call() -> None:
    given = made(x=torch.randn(1, 6, 8), cu_seqlens=torch.tensor([0, 4, 6]))
    causal_conv1d(**given)
    given["cu_seqlens"] = torch.tensor([0, 7, 6])
    with pytest.raises(InvalidInputError, match="not decrease"):
        causal_conv1d(**given)


def test_indices_are_checked_at_every_call() -> None:
    given = (torch.randn(2, 8), torch.randn(4, 8, 3), torch.randn(8, 4))
    causal_conv1d_update(*given, state_indices=torch.tensor([0, 3]))
    for wrong in ([0, 4], [1, 1]):
        with pytest.raises(InvalidInputError):
            causal_conv1d_update(*given, state_indices=torch.tensor(wrong))


def test_an_update_of_a_state_with_a_gradient_is_refused_after_one_without() -> None:
    x, state, weight = torch.randn(2, 8), torch.randn(2, 8, 3), torch.randn(8, 4)
    causal_conv1d_update(x, state, weight)
    with pytest.raises(InvalidInputError, match="gradient"):
        causal_conv1d_update(x, state.requires_grad_(), weight)


def test_what_a_plan_depends_on() -> None:
    given = made()
    calls = [
        given,
        made(bias=None),
        made(activation=None),
        made(initial_state=None),
        made(return_final_state=False),
        made(state_len=3, initial_state=None),
        made(x=torch.randn(2, 8, 6).mT),
        made(x=torch.randn(2, 7, 8)),
        made(residual=torch.randn(2, 6, 8)),
    ]
    plans = []
    for call in calls:
        results = [causal_conv1d(**call) for _ in range(2)]
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
        plans.append(len(run._plans))
    # The number of columns by default is that of another call.
    assert plans == [1, 2, 3, 4, 5, 5, 6, 7, 8]


@pytest.mark.parametrize("function", [run.FORWARD, run.BACKWARD, run.UPDATE])
@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_filters_that_no_kernel_has(
    kernels: str, function: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resolve, "_logged", set())
    results = {
        "auto": CandidateResult(kernels, kernels, True, ""),
        kernels: CandidateResult(kernels, kernels, True, "", explicit=True),
        "reference": CandidateResult("reference", "reference", True, "", explicit=True),
    }
    monkeypatch.setattr(backend_choice, "choose", lambda request, backend: results[backend])
    x, wide = torch.randn(2, 6, 8), torch.randn(8, 5)
    assert run._choose(function, x, wide[:, 1:], kernels)[0].backend == kernels
    assert not caplog.records
    assert run._choose(function, x, wide, "auto")[0].backend == "reference"
    assert "2 to 4 taps, not 5" in caplog.text
    with pytest.raises(BackendUnavailableError, match="2 to 4 taps, not 5"):
        run._choose(function, x, wide, kernels)
