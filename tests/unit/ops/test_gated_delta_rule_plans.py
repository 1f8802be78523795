"""Plans of gated_delta_rule: calls that repeat skip the dispatcher, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gated_delta_rule_calls import differentiable, made

from flashvar.backends.cuda import gated_delta_rule as cuda
from flashvar.errors import BackendUnavailableError, InvalidInputError, LayoutError, ShapeError
from flashvar.ops.gated_delta_rule import run
from flashvar.ops.gated_delta_rule.api import gated_delta_rule
from flashvar.ops.plans import Plans


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """None yet."""
    torch.manual_seed(0)
    found: Plans[Any] = Plans()
    monkeypatch.setattr(run, "_plans", found)
    return found


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that go through the dispatcher."""
    from flashvar.ops.gated_delta_rule import api

    calls: list[str] = []
    for name in ("gated_delta_rule_fwd", "gated_delta_rule_update"):
        real = getattr(api, name)

        def counted(*arguments: Any, real: Any = real, name: str = name) -> Any:
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(api, name, counted)
    return calls


@pytest.mark.parametrize("kind", ["plain", "fused", "packed", "no state"])
def test_calls_that_repeat(kind: str, dispatched: list[str]) -> None:
    given = made(
        seqlen=5,
        raw=kind == "fused",
        packed=(3, 0, 2) if kind == "packed" else None,
        state=kind != "no state",
    )
    first = gated_delta_rule(**given, return_final_state=True)
    second = gated_delta_rule(**given, return_final_state=True)
    assert len(dispatched) == 1
    for one, other in zip(first, second, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert gated_delta_rule(**given)[1] is None


def test_gradients_of_calls_that_repeat(dispatched: list[str]) -> None:
    given = made(seqlen=5, raw=True)
    grads = []
    for _ in range(2):
        leaves = differentiable(given)
        out, final = gated_delta_rule(**{**given, **leaves}, return_final_state=True)
        assert final is not None
        loss = out.sin().sum() + final.cos().sum()
        grads.append(torch.autograd.grad(loss, list(leaves.values())))
    assert len(dispatched) == 1
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_some_gradients_of_calls_that_repeat() -> None:
    given = made(seqlen=5)
    gated_delta_rule(**given)
    leaf = given["v"].requires_grad_()
    out, _ = gated_delta_rule(**given)
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(BackendUnavailableError, match="first derivatives only"):
        grad.sum().backward()
    with torch.no_grad():
        assert not gated_delta_rule(**given)[0].requires_grad


def test_pools_of_calls_that_repeat(dispatched: list[str]) -> None:
    given = made(seqlen=2, state=False)
    states, places = torch.randn(4, 2, 8, 6, dtype=torch.float64), torch.tensor([3, 0])
    pools = [states.clone(), states.clone()]
    outs = []
    for pool in pools:
        version = pool._version
        out, same = gated_delta_rule(
            **given, initial_state=pool, state_indices=places, return_final_state=True
        )
        assert same is pool
        assert pool._version > version
        outs.append(out)
    assert dispatched == ["gated_delta_rule_update"]
    assert torch.equal(*outs)
    assert torch.equal(*pools)
    assert not torch.equal(pools[0], states)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_the_dispatcher_is_entered_once(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes all arguments of a Python kernel apart, which is most of an op's host time."""
    given = made(seqlen=5)
    leaves = differentiable(given) if grad else {}
    given |= leaves
    state = given.pop("initial_state")
    arguments = (*given.values(), None, None, None, None, False, False, False, "kv", "auto")
    expected = gated_delta_rule(**given, initial_state=state, return_final_state=True)
    monkeypatch.delattr(torch._ops.OpOverload, "redispatch")
    found = [torch.ops.flashvar.gated_delta_rule_fwd.default(state, *arguments) for _ in range(3)]
    for results in found:
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
    if grad:
        wanted, *of_ops = (
            torch.autograd.grad(out.sin().sum() + final.cos().sum(), list(leaves.values()))
            for out, final in (expected, *found)
        )
        for one in of_ops:
            torch.testing.assert_close(one, wanted, rtol=0, atol=0)


def test_the_dispatcher_is_entered_once_by_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    given = made(seqlen=2, state=False)
    states, places = torch.randn(4, 2, 8, 6, dtype=torch.float64), torch.tensor([3, 0])
    expected = states.clone()
    wanted, _ = gated_delta_rule(**given, initial_state=expected, state_indices=places)
    monkeypatch.delattr(torch._ops.OpOverload, "redispatch")
    arguments = (*given.values(), None, None, None, None, False, False, False, "kv", "auto")
    for _ in range(3):
        pool = states.clone()
        version = pool._version
        out = torch.ops.flashvar.gated_delta_rule_update.default(pool, places, *arguments)
        assert torch.equal(out, wanted)
        assert torch.equal(pool, expected)
        assert pool._version > version


@pytest.mark.parametrize("name", ["q", "g", "initial_state"])
def test_a_functional_tensor_of_a_call_that_repeats(name: str) -> None:
    """Its memory is empty. Torch functionalizes the op, without a transform that says so."""
    given = made(seqlen=5)
    expected = gated_delta_rule(**given)[0]
    torch._enable_functionalization(reapply_views=True)
    try:
        given[name] = torch._to_functional_tensor(given[name])
        state = given.pop("initial_state")
        rest = (*given.values(), None, None, None, None, False, False, False, "kv", "auto")
        found, _ = torch.ops.flashvar.gated_delta_rule_fwd.default(state, *rest)
        assert torch.equal(torch._from_functional_tensor(found), expected)
    finally:
        torch._disable_functionalization()


@pytest.mark.parametrize("seqlen", [1, 200])
def test_rows_that_start_elsewhere(seqlen: int, dispatched: list[str]) -> None:
    """Only the choice of what computes by chunks depends on that."""
    given = made(seqlen=seqlen)
    room = torch.empty(given["q"].numel() + 1, dtype=given["q"].dtype)
    shifted = room[1:].view(given["q"].shape).copy_(given["q"])
    usual = given["q"]
    outs = [gated_delta_rule(**{**given, "q": q})[0] for q in (usual, usual, shifted)]
    assert torch.equal(outs[0], outs[2])
    assert len(dispatched) == (1 if seqlen == 1 else 2)


def test_what_is_refused_after_a_call_that_is_not() -> None:
    given = made(seqlen=5, packed=(3, 2), dtype=torch.float32)
    gated_delta_rule(**given)
    for change in (
        {"qk_l2norm": 0},
        {"return_final_state": 1},
        {"scale": "1"},
        {"backend": ["auto"]},
        {"state_layout": 1},
        {"g": given["g"] + 5},
        {"beta": given["beta"].tolist()},
        {"beta": given["beta"].to_sparse()},
        {"cu_seqlens": torch.tensor([0, 6, 5])},
        {"state_indices": torch.tensor([0, 2])},
    ):
        for _ in range(2):
            with pytest.raises(InvalidInputError):
                gated_delta_rule(**{**given, **change})
    with pytest.raises(ShapeError):
        gated_delta_rule(**{**given, "v": given["v"][:, :4]})


def test_what_a_plan_depends_on(plans: dict[Any, Any]) -> None:
    given = made(seqlen=5, dtype=torch.float32)
    calls = [
        given,
        {**given, "g": None},
        {**given, "scale": 2.0},
        {**given, "initial_state": None},
        {**given, "qk_l2norm": True},
        {**given, "q": given["q"].transpose(0, 1).contiguous().transpose(0, 1)},
        {**given, "state_indices": torch.tensor([1, 0])},
        {**given, "state_indices": torch.tensor([1, 0], dtype=torch.int32)},
    ]
    for count, call in enumerate(calls, 1):
        for _ in range(2):
            gated_delta_rule(**call)
        assert len(plans) == count


def test_a_plan_depends_on_the_strides_of_every_tensor(plans: dict[Any, Any]) -> None:
    given = made(seqlen=5, packed=(3, 2), dtype=torch.float32)
    given |= {"A_log": torch.rand(2), "dt_bias": torch.rand(2)}
    given["state_indices"] = torch.tensor([1, 0])
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 10
    gated_delta_rule(**given)
    for count, name in enumerate(tensors, 2):
        moved = torch.stack((given[name], given[name]), -1)[..., 0]
        gated_delta_rule(**{**given, name: moved})
        assert len(plans) == count, name


def test_what_a_plan_of_a_backward_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: Plans[Any] = Plans()
    monkeypatch.setattr(run, "_backward_plans", plans)
    given = made(seqlen=5, dtype=torch.float32)
    states, tensors = given["initial_state"], [given[name] for name in ("q", "k", "v", "g", "beta")]
    out, final = gated_delta_rule(**given, return_final_state=True)
    assert final is not None
    grad_out, grad_final = torch.randn_like(out), torch.randn_like(final)
    room = torch.empty(out.numel() + 1)
    shifted = room[1:].view(out.shape).copy_(grad_out)
    turned = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    options = (None, False, False, False, "kv", "auto")
    usual = [grad_out, grad_final, states, *tensors, None, None, None]
    calls = [
        (usual, options),
        ([None, *usual[1:]], options),
        ([grad_out, None, *usual[2:]], options),
        ([turned, *usual[1:]], options),
        ([shifted, *usual[1:]], options),
        ([grad_out, grad_final.mT.contiguous().mT, *usual[2:]], options),
        ([grad_out, grad_final, None, *usual[3:]], options),
        (
            [*usual[:3], tensors[0].transpose(0, 1).contiguous().transpose(0, 1), *usual[4:]],
            options,
        ),
        (usual, (2.0, *options[1:])),
        (usual, (None, True, *options[2:])),
    ]
    results = []
    for count, (each, named) in enumerate(calls, 1):
        results.append([run.gradients(tuple(each), named) for _ in range(2)])
        assert len(plans) == count
    for (each, named), twice in zip(calls, results, strict=True):
        plans.clear()
        alone = run.gradients(tuple(each), named)
        for wanted, *found in zip(alone, *twice, strict=True):
            assert all((grad is None) is (wanted is None) for grad in found)
            assert all(grad is None or torch.equal(grad, wanted) for grad in found)


def test_a_negated_view_goes_through_the_dispatcher(dispatched: list[str]) -> None:
    """Kernels read its memory, which holds the values before."""
    given = made(seqlen=5)
    expected = gated_delta_rule(**{**given, "v": given["v"].neg()})[0]
    assert torch.equal(gated_delta_rule(**{**given, "v": torch._neg_view(given["v"])})[0], expected)
    assert len(dispatched) == 2


@pytest.mark.parametrize("view", ["expanded", "unfolded"])
def test_a_pool_whose_states_share_memory_is_refused(view: str) -> None:
    given = made(seqlen=1)
    states = given.pop("initial_state")
    count = states.shape[0]
    pool = states[:1].expand(count, *states.shape[1:])
    if view == "unfolded":
        step = states[0].numel() - 1
        pool = states.flatten().unfold(0, states[0].numel(), step)[:count].view_as(states)
    with pytest.raises(LayoutError, match="memory of its own"):
        gated_delta_rule(
            **given,
            initial_state=pool,
            state_indices=torch.arange(count),
        )


def test_offsets_of_binaries_lie_side_by_side() -> None:
    wide = torch.tensor([0, 9, 3, 9, 3, 9, 5, 9], dtype=torch.int32)
    given = made(seqlen=5, packed=(3, 0, 2))
    tensors = [given[name] for name in ("q", "k", "v", "g", "beta")]
    inputs = run.given((*tensors, None, None, wide[::2], None, False, False, False))
    found = cuda._offsets(inputs.cu_seqlens)
    assert found is not None
    assert found.is_contiguous()
    assert found.tolist() == [0, 3, 3, 5]
