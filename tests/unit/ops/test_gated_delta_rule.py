"""The gated delta rule on the CPU: values, gradients, hostile inputs, states."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from gated_delta_rule_calls import Tensors, differentiable, made, positional
from gated_delta_rule_oracle import recurrent

import flashvar
from flashvar.backends.reference import gated_delta_rule as reference
from flashvar.backends.reference.gated_delta_rule import chunked, recurrence
from flashvar.ops.gated_delta_rule.api import gated_delta_rule
from flashvar.ops.gated_delta_rule.torch_library import (
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    gated_delta_rule_update,
)

INF = torch.inf
OPCHECK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[recurrence, chunked], ids=["recurrence", "chunked"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Each form of the reference, whatever the length."""
    chosen: ModuleType = request.param
    monkeypatch.setattr(reference, "_algorithm", lambda terms: chosen)
    return chosen


def compared(given: Tensors, limit: float = 1e-11, **options: Any) -> None:
    """Out, final state and all gradients against the oracle's, by the norm of the difference."""
    results = []
    for call in (gated_delta_rule, recurrent):
        leaves = differentiable(given)
        ours = {"return_final_state": True, **options} if call is gated_delta_rule else {}
        found = call(**{**given, **leaves}, **ours)
        torch.manual_seed(1)
        weights = [torch.randn(x.shape, dtype=torch.float64) for x in found]
        loss = sum((x.double() * w).sum() for x, w in zip(found, weights, strict=True))
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        for name, grad in zip(leaves, grads, strict=True):
            assert (grad.dtype, grad.shape) == (given[name].dtype, given[name].shape)
        results.append(
            {"out": found[0], "final": found[1], **dict(zip(leaves, grads, strict=True))}
        )
    for name, expected in results[1].items():
        found, expected = results[0][name].detach().double(), expected.detach().double()
        assert torch.isfinite(found).all(), name
        error = (found - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error <= limit or (found - expected).abs().max() <= 0.1 * limit, (name, error)


@pytest.mark.parametrize("raw", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("seqlen", [1, 5, 64, 70, 130])
def test_values_and_gradients(seqlen: int, raw: bool, form: ModuleType) -> None:
    compared(made(seqlen=seqlen, raw=raw))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)], ids=str)
@pytest.mark.parametrize("dims", [(1, 1), (8, 16), (40, 7)], ids=str)
def test_shapes(heads: tuple[int, int], dims: tuple[int, int], form: ModuleType) -> None:
    compared(made(seqlen=9, heads=heads, dims=dims))


@pytest.mark.parametrize("raw", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("packed", [(3, 70, 0, 1), (0, 0, 16), (0,), (5,)], ids=str)
def test_packed(packed: tuple[int, ...], raw: bool, form: ModuleType) -> None:
    compared(made(packed=packed, raw=raw))


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 3e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)],
    ids=str,
)
def test_dtypes(dtype: torch.dtype, limit: float, form: ModuleType) -> None:
    compared(made(dtype=dtype, raw=True), limit)
    compared(made(dtype=dtype), limit)


def test_without_what_is_optional(form: ModuleType) -> None:
    given = made(state=False)
    del given["g"]
    compared({**given, "g": None})
    given = made(raw=True)
    del given["dt_bias"]
    compared({**given, "scale": 3.0})


GATES = {
    "none": 0.0,
    "mild": -1e-4,
    "strong": -20.0,
    "beyond float32": -104.5,
    "largest": -1e30,
    "forgets": -INF,
}


OF_GATES = [(torch.float64, name) for name in GATES]
# What float32 has no number for, or none of its inverse.
OF_GATES += [(torch.float32, name) for name in ("beyond float32", "largest", "forgets")]


@pytest.mark.parametrize(("dtype", "name"), OF_GATES, ids=str)
def test_gates(name: str, dtype: torch.dtype, form: ModuleType) -> None:
    gate, limit = GATES[name], 1e-11 if dtype == torch.float64 else 3e-5
    given = made(dtype=dtype)
    given["g"][0, 2::3] = gate
    given["g"][1, 40:43] = gate
    compared(given, limit)
    given["g"][:] = gate
    compared(given, limit)


def test_a_gate_that_forgets_cuts(form: ModuleType) -> None:
    """What is before it counts for nothing, and has gradients of 0."""
    given = made(seqlen=40)
    given["g"][:, 20] = -INF
    leaves = differentiable(given)
    out, _ = gated_delta_rule(**{**given, **leaves})
    out[:, 20:].sum().backward()
    for name in ("q", "k", "v", "beta"):
        assert (leaves[name].grad[:, :20] == 0).all()
    # In chunks a sum of terms that cancel.
    assert (leaves["g"].grad[:, :20].abs() <= 1e-13).all()
    assert (leaves["g"].grad[:, 20] == 0).all()
    assert (leaves["initial_state"].grad == 0).all()


def test_an_infinite_raw_gate(form: ModuleType) -> None:
    given = made(seqlen=40, raw=True)
    given["g"][:, 7], given["g"][:, 9] = INF, -INF
    leaves = differentiable(given)
    out, _ = gated_delta_rule(**{**given, **leaves})
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in leaves.values())
    plain = {**given, "g": given["g"].clone()}
    plain["g"][:, 7], plain["g"][:, 9] = 1e6, -1e6
    torch.testing.assert_close(out, gated_delta_rule(**plain)[0])


@pytest.mark.parametrize("beta", [1.0, 2.0, 1.99])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equal_keys(dtype: torch.dtype, beta: float, form: ModuleType) -> None:
    """Of length 1: the inverse of a chunk by doubling would have no digit here."""
    given = made(seqlen=130 if form is chunked else 20, dtype=dtype)
    given["k"][:] = given["k"][:, :1]
    given["g"][:] = 0
    given["beta"][:] = beta
    compared(given, 1e-10 if dtype == torch.float64 else 1e-4)


def test_keys_of_any_length(form: ModuleType) -> None:
    given = made(seqlen=70)
    given["k"] *= 1.3
    given["k"][:, 10:14] *= 4
    compared(given, 1e-9)


def test_a_call_may_be_cut_anywhere(form: ModuleType) -> None:
    given = made(seqlen=70)
    whole, final = gated_delta_rule(**given, return_final_state=True)
    for cut in (1, 63, 64, 69):
        rows = ("q", "k", "v", "g", "beta")
        first = {**given, **{x: given[x][:, :cut] for x in rows}}
        head, state = gated_delta_rule(**first, return_final_state=True)
        second = {**given, **{x: given[x][:, cut:] for x in rows}, "initial_state": state}
        tail, after = gated_delta_rule(**second, return_final_state=True)
        torch.testing.assert_close(torch.cat((head, tail), 1), whole)
        torch.testing.assert_close(after, final)


def test_v_major_states() -> None:
    given = made(seqlen=9)
    expected, final = gated_delta_rule(**given, return_final_state=True)
    turned = {**given, "initial_state": given["initial_state"].mT.contiguous()}
    leaves, turned_leaves = differentiable(given), differentiable(turned)
    out, state = gated_delta_rule(
        **{**turned, **turned_leaves}, return_final_state=True, state_layout="vk"
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state, final.mT)
    assert state.is_contiguous()
    (out.sin().sum() + state.sin().sum()).backward()
    out, state = gated_delta_rule(**{**given, **leaves}, return_final_state=True)
    (out.sin().sum() + state.sin().sum()).backward()
    grad = turned_leaves.pop("initial_state").grad
    torch.testing.assert_close(grad, leaves["initial_state"].grad.mT)
    for name, leaf in turned_leaves.items():
        torch.testing.assert_close(leaf.grad, leaves[name].grad)


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("seqlen", [1, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pool_of_states(dtype: torch.dtype, seqlen: int, layout: str) -> None:
    given = made(3, seqlen, dtype=torch.bfloat16, state=False)
    pool = torch.randn(5, 2, 8, 6).to(dtype)
    indices = torch.tensor([4, -1, 2], dtype=torch.int32)
    before = torch.where((indices >= 0).view(-1, 1, 1, 1), pool[indices.clamp(min=0)], 0).float()
    expected, final = gated_delta_rule(**given, initial_state=before, return_final_state=True)
    changed = (pool if layout == "kv" else pool.mT.contiguous()).clone()
    out, same = gated_delta_rule(
        **given,
        initial_state=changed,
        state_indices=indices,
        state_layout=layout,
        return_final_state=True,
    )
    assert same is changed
    torch.testing.assert_close(out, expected)
    after = changed if layout == "kv" else changed.mT
    assert torch.equal(after[[0, 1, 3]], pool[[0, 1, 3]])
    torch.testing.assert_close(after[[4, 2]], final[[0, 2]].to(dtype))


def test_a_pool_beside_packed_sequences() -> None:
    given = made(packed=(2, 0, 3), state=False)
    pool = torch.randn(4, 2, 8, 6, dtype=torch.float64)
    before = pool.clone()
    indices = torch.tensor([3, 1, 0])
    expected, final = recurrent(**given, initial_state=before[indices])
    out, none = gated_delta_rule(**given, initial_state=pool, state_indices=indices)
    assert none is None
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(pool[indices], final)
    assert torch.equal(pool[[1, 2]], before[[1, 2]])


def test_a_pool_without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    given = made(2, 4, state=False)
    pool = torch.empty(0, 2, 8, 6, dtype=torch.float64)
    monkeypatch.setattr("flashvar.ops.gated_delta_rule.run.check_state_indices", lambda *_: None)
    # Index 1 is beyond the pool, which is not checked on CUDA devices.
    out, _ = gated_delta_rule(**given, initial_state=pool, state_indices=torch.tensor([-1, 1]))
    torch.testing.assert_close(out, gated_delta_rule(**given)[0])


@pytest.mark.parametrize("view", ["sliced", "every second", "heads first", "expanded"])
def test_strides(view: str) -> None:
    given = made(seqlen=9)
    if view == "expanded":
        given["v"] = given["v"][:1].expand(2, -1, -1, -1)
    expected = gated_delta_rule(**{**given, "v": given["v"].contiguous()})[0]
    for name in ("q", "k", "v"):
        x = given[name]
        if view == "sliced":
            given[name] = torch.cat((x, x), -1)[..., : x.shape[-1]]
        elif view == "every second":
            given[name] = x.repeat_interleave(2, -1)[..., ::2]
        elif view == "heads first":
            given[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(gated_delta_rule(**given)[0], expected)


@pytest.mark.parametrize("empty", ["batch", "seqlen", "heads", "sequences"])
def test_empty(empty: str) -> None:
    given = made(**{empty: 0}) if empty in ("batch", "seqlen") else made(seqlen=0)
    if empty == "heads":
        given = made(heads=(1, 0))
    if empty == "sequences":
        given = made(packed=())
        assert given["cu_seqlens"].tolist() == [0]
    leaves = differentiable(given)
    out, final = gated_delta_rule(**{**given, **leaves}, return_final_state=True)
    assert out.shape == given["v"].shape
    assert torch.equal(final, given["initial_state"]) or empty == "heads"
    (out.sum() + final.sum()).backward()
    assert all((x.grad == 0).all() for n, x in leaves.items() if n != "initial_state")


def test_the_same_bits_again() -> None:
    given = made(dtype=torch.bfloat16, raw=True)
    first, second = (gated_delta_rule(**given)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_autocast_casts_nothing() -> None:
    given = made(dtype=torch.float32)
    expected = gated_delta_rule(**given)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = gated_delta_rule(**given)[0]
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)


def test_autocast_leaves_gradients_alone() -> None:
    given = made(dtype=torch.float32, raw=True)
    results = []
    for enabled in (False, True):
        leaves = differentiable(given)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, _ = flashvar.gated_delta_rule(**{**given, **leaves})
        results.append(torch.autograd.grad(out.square().sum(), list(leaves.values())))
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


def test_operations_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    given = made(batch=2, seqlen=5, heads=(1, 2), dims=(8, 6))
    product = 2 * (2 * 5 * 2) * 8 * 6
    with FlopCounterMode(display=False) as counter:
        out, _ = flashvar.gated_delta_rule(**{**given, "v": given["v"].requires_grad_()})
        assert counter.get_total_flops() == 3 * product
        out.sum().backward()
    assert counter.get_total_flops() == (3 + 7) * product
    decoded = {**given, "v": given["v"].detach(), "initial_state": torch.randn(4, 2, 8, 6).double()}
    with FlopCounterMode(display=False) as counter:
        flashvar.gated_delta_rule(**decoded, state_indices=torch.tensor([2, 0]))
    assert counter.get_total_flops() == 3 * product


@OPCHECK
@pytest.mark.parametrize("kind", ["plain", "fused", "packed", "least"])
def test_opcheck(kind: str) -> None:
    packed = (3, 0, 7) if kind == "packed" else None
    given = made(seqlen=10, dtype=torch.float32, raw=kind == "fused", packed=packed)
    if kind == "least":
        given.update(g=None, initial_state=None)
    leaves = {**given, **differentiable(given)}
    layout = "vk" if kind == "fused" else "kv"
    if layout == "vk":
        leaves["initial_state"] = given["initial_state"].mT.contiguous().requires_grad_()
    torch.library.opcheck(
        gated_delta_rule_fwd, (leaves["initial_state"], *positional(leaves, layout))
    )
    state = leaves["initial_state"]
    results = gated_delta_rule_fwd(
        state if state is None else state.detach(), *positional(given, layout)
    )
    # What is traced of the forward for training has the backward in it.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for grads in (results, (results[0], None)):
        arguments = (*grads, None if state is None else state.detach(), *positional(given, layout))
        torch.library.opcheck(gated_delta_rule_bwd, arguments, test_utils=checks)


@OPCHECK
def test_opcheck_of_the_update() -> None:
    given = made(seqlen=2, dtype=torch.float32)
    indices = torch.tensor([1, -1])
    torch.library.opcheck(
        gated_delta_rule_update, (given["initial_state"], indices, *positional(given))
    )


@pytest.mark.parametrize(
    ("packed", "dynamic"),
    [(None, False), (None, True), ((3, 0, 7), True)],
    ids=["static", "dynamic", "packed and dynamic"],
)
def test_compiled_training(packed: tuple[int, ...] | None, dynamic: bool) -> None:
    torch._dynamo.reset()
    given = made(seqlen=10, dtype=torch.float32, raw=True, packed=packed)
    leaves = differentiable(given)

    def step(leaves: Tensors) -> torch.Tensor:
        out, final = gated_delta_rule(**{**given, **leaves}, return_final_state=True)
        return out.square().sum() + final.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found, expected = (
        torch.autograd.grad(call(leaves), list(leaves.values())) for call in (compiled, step)
    )
    torch.testing.assert_close(found, expected)


def test_compiled_decoding() -> None:
    torch._dynamo.reset()
    given = made(seqlen=1, dtype=torch.float32)
    indices = torch.tensor([1, 0])

    def step(pool: torch.Tensor) -> torch.Tensor:
        out, _ = gated_delta_rule(**{**given, "initial_state": pool}, state_indices=indices)
        return out + pool.sum()

    pools = [given["initial_state"].clone() for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(pools[0]), step(pools[1]))
    torch.testing.assert_close(*pools)
    assert not torch.equal(pools[0], given["initial_state"])


def test_meta_tensors() -> None:
    given = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x
        for name, x in made(dtype=torch.bfloat16).items()
    }
    out, final = gated_delta_rule(**given, return_final_state=True)
    assert (out.shape, out.dtype, out.is_meta) == ((2, 70, 2, 6), torch.bfloat16, True)
    assert (final.shape, final.dtype) == ((2, 2, 8, 6), torch.float32)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_gradients_of_meta_tensors(layout: str, packed: bool) -> None:
    given = made(batch=1, dtype=torch.bfloat16)
    state = torch.zeros(1, 2, 8, 6) if layout == "kv" else torch.zeros(1, 2, 6, 8)
    leaves = {
        name: x.detach().to("meta").requires_grad_()
        for name, x in (given | {"initial_state": state}).items()
        if isinstance(x, torch.Tensor)
    }
    ends = torch.tensor([0, 70], dtype=torch.int32, device="meta") if packed else None
    out, _ = gated_delta_rule(**{**given, **leaves}, state_layout=layout, cu_seqlens=ends)
    out.sum().backward()
    for name, leaf in leaves.items():
        assert (leaf.grad.shape, leaf.grad.is_meta) == (leaf.shape, True), name


def test_second_derivatives_are_refused() -> None:
    given = made(seqlen=3)
    leaves = differentiable(given)
    out, _ = gated_delta_rule(**{**given, **leaves})
    (grad,) = torch.autograd.grad(out.sin().sum(), leaves["q"], create_graph=True)
    with pytest.raises(flashvar.BackendUnavailableError, match="first derivatives only"):
        grad.sum().backward()


def test_checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    given = made(seqlen=9)
    leaves = differentiable(given)
    whole = {**given, **leaves}
    found, expected = (
        torch.autograd.grad(out.sin().sum(), list(leaves.values()))
        for out in (
            checkpoint(lambda: gated_delta_rule(**whole)[0], use_reentrant=False),
            gated_delta_rule(**whole)[0],
        )
    )
    torch.testing.assert_close(found, expected)
