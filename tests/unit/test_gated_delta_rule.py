"""The gated delta rule on the CPU: values, gradients, hostile inputs, states, refusals.

One file, since every test uses the same oracle and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
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

Tensors = dict[str, Any]
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


def made(
    batch: int = 2,
    seqlen: int = 70,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (8, 6),
    dtype: torch.dtype = torch.float64,
    packed: tuple[int, ...] | None = None,
    raw: bool = False,
    state: bool = True,
) -> Tensors:
    """Keys of length 1 unless `raw`, with everything that is fused then."""
    if packed is not None:
        batch, seqlen = 1, sum(packed)
    wide = torch.promote_types(dtype, torch.float32)
    few, many = heads
    given: Tensors = {
        "q": torch.randn(batch, seqlen, few, dims[0]).to(dtype),
        "k": torch.randn(batch, seqlen, few, dims[0]).to(dtype),
        "v": torch.randn(batch, seqlen, many, dims[1]).to(dtype),
        "g": -torch.rand(batch, seqlen, many, dtype=wide),
        "beta": 2 * torch.rand(batch, seqlen, many, dtype=wide),
    }
    if raw:
        given["g"] = torch.randn(batch, seqlen, many).to(dtype)
        given["beta"] = torch.randn(batch, seqlen, many).to(dtype)
        given["A_log"] = torch.randn(many, dtype=wide)
        given["dt_bias"] = torch.randn(many).to(dtype)
        given.update(qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True)
    else:
        given["k"] = torch.nn.functional.normalize(given["k"].to(wide), dim=-1).to(dtype)
    if packed is not None:
        given["cu_seqlens"] = torch.tensor([0, *packed]).cumsum(0)
    if state:
        count = batch if packed is None else len(packed)
        given["initial_state"] = torch.randn(count, many, *dims, dtype=wide)
    return given


def differentiable(given: Tensors) -> Tensors:
    return {
        name: x.detach().clone().requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_gates(gate: float, dtype: torch.dtype, form: ModuleType) -> None:
    limit = 1e-11 if dtype == torch.float64 else 3e-5
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


def positional(given: Tensors, layout: str = "kv") -> tuple[Any, ...]:
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "scale")
    flags = (given.get(x, False) for x in ("qk_l2norm", "beta_sigmoid", "allow_neg_eigval"))
    return (*(given.get(x) for x in names), *flags, layout, "auto")


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


Change = Callable[[Tensors], Tensors]
REFUSALS: dict[str, tuple[Change, type[Exception], str]] = {
    "no tensor": (lambda x: {"q": 3}, flashvar.InvalidInputError, "q must be a torch.Tensor"),
    "no beta": (lambda x: {"beta": None}, flashvar.InvalidInputError, "got NoneType"),
    "a sparse tensor": (lambda x: {"g": x["g"].to_sparse()}, flashvar.LayoutError, "strided"),
    "a switch": (
        lambda x: {"qk_l2norm": 1}, flashvar.InvalidInputError, "qk_l2norm must be True or False"
    ),
    "scale": (lambda x: {"scale": "1"}, flashvar.InvalidInputError, "scale must be a number"),
    "scale of nan": (
        lambda x: {"scale": float("nan")}, flashvar.InvalidInputError, "float32 can hold, got nan"
    ),
    "scale of float64": (
        lambda x: {"scale": 10**40}, flashvar.InvalidInputError, "must be a finite number"
    ),
    "backend": (lambda x: {"backend": "best"}, flashvar.InvalidInputError, "got 'best'"),
    "state_layout": (lambda x: {"state_layout": "kk"}, flashvar.LayoutError, "got 'kk'"),
    "dimensions": (lambda x: {"q": x["q"][0]}, flashvar.ShapeError, "with .unsqueeze(0)"),
    "dtype": (lambda x: {"q": x["q"].int()}, flashvar.DtypeError, "got torch.int32"),
    "dtypes": (lambda x: {"k": x["k"].half()}, flashvar.DtypeError, "one dtype"),
    "k and q": (lambda x: {"k": x["k"][..., 1:]}, flashvar.ShapeError, "q and k must have one"),
    "no head dim": (lambda x: {"v": x["v"][..., :0]}, flashvar.ShapeError, "at least 1"),
    "rows of v": (lambda x: {"v": x["v"][:, 1:]}, flashvar.ShapeError, "batch and seqlen of q"),
    "heads": (
        lambda x: {"q": x["q"].expand(-1, -1, 3, -1), "k": x["k"].expand(-1, -1, 3, -1)},
        flashvar.ShapeError,
        "a multiple of those of q and k, got 2 and 3",
    ),
    "g": (lambda x: {"g": x["g"][..., :1]}, flashvar.ShapeError, "g must be [batch, seqlen"),
    "beta of H": (lambda x: {"beta": x["beta"].mT}, flashvar.ShapeError, "beta must be [batch"),
    "dtype of g": (lambda x: {"g": x["g"].double()}, flashvar.DtypeError, "got torch.float64"),
    "A_log": (
        lambda x: {"A_log": torch.zeros(3)}, flashvar.ShapeError, "A_log must be [heads of v]"
    ),
    "A_log alone": (
        lambda x: {"A_log": torch.zeros(2), "g": None}, flashvar.InvalidInputError, "g must be"
    ),
    "dt_bias alone": (
        lambda x: {"dt_bias": torch.zeros(2)}, flashvar.InvalidInputError, "must come with A_log"
    ),
    "allow_neg_eigval": (
        lambda x: {"allow_neg_eigval": True}, flashvar.InvalidInputError, "with beta_sigmoid=True"
    ),
    "a gate above 0": (
        lambda x: {"g": x["g"] + 2}, flashvar.InvalidInputError, "g must be at most 0"
    ),
    "cu_seqlens with a batch": (
        lambda x: {"cu_seqlens": torch.tensor([0, 5])}, flashvar.ShapeError, "must have batch 1"
    ),
    "initial states": (
        lambda x: {"initial_state": x["initial_state"][:1]},
        flashvar.ShapeError,
        "that is (2, 2, 8, 6), got (1, 2, 8, 6)",
    ),
    "their order": (
        lambda x: {"state_layout": "vk"}, flashvar.ShapeError, "[sequences, heads of v, V, K]"
    ),
    "their dtype": (
        lambda x: {"initial_state": x["initial_state"].bfloat16()}, flashvar.DtypeError, "float32"
    ),
    "another device": (
        lambda x: {"beta": x["beta"].to("meta")}, flashvar.DeviceError, "cpu and meta"
    ),
    "no pool": (
        lambda x: {"state_indices": torch.tensor([0, 1]), "initial_state": None},
        flashvar.InvalidInputError,
        "initial_state must be given",
    ),
    "a pool of others": (
        lambda x: {
            "state_indices": torch.tensor([0, 1]), "initial_state": x["initial_state"][:, :1]
        },
        flashvar.ShapeError,
        "[pool, 2, 8, 6]",
    ),
    "a pool's dtype": (
        lambda x: {
            "state_indices": torch.tensor([0, 1]), "initial_state": x["initial_state"].half()
        },
        flashvar.DtypeError,
        "got torch.float16",
    ),
    "indices": (
        lambda x: {"state_indices": torch.tensor([0])}, flashvar.ShapeError, "that is (2,)"
    ),
    "indices' dtype": (
        lambda x: {"state_indices": torch.tensor([0.0, 1.0])}, flashvar.DtypeError, "int32"
    ),
    "indices beyond": (
        lambda x: {"state_indices": torch.tensor([0, 2])}, flashvar.ShapeError, "got 2"
    ),
    "indices twice": (
        lambda x: {"state_indices": torch.tensor([1, 1])}, flashvar.InvalidInputError, "got 1 more"
    ),
    "a pool with a gradient": (
        lambda x: {
            "state_indices": torch.tensor([0, 1]), "q": x["q"].clone().requires_grad_()
        },
        flashvar.InvalidInputError,
        "require no gradient",
    ),
    "no kernels": (
        lambda x: {"backend": "cuda"},
        flashvar.BackendUnavailableError,
        "expected backend 'cuda' to serve it, found:\ncuda: no: serves CUDA tensors",
    ),
    "no device": (
        lambda x: {"backend": "triton"},
        flashvar.BackendUnavailableError,
        "serves CUDA tensors, the request has CPU tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(change: Change, kind: type[Exception], words: str) -> None:
    given = made(seqlen=5, dtype=torch.float32)
    with pytest.raises(kind) as found:
        gated_delta_rule(**{**given, **change(given)})
    assert type(found.value) is kind
    message = str(found.value)
    assert words in message
    # What was expected, what was found, what to do.
    assert ", got " in message or ", found:" in message
    assert ": " in message


@pytest.mark.parametrize("offsets", [[0, 3], [1, 5], [0, 4, 2, 5], [0, 6], [-1, 5]], ids=str)
def test_offsets_of_no_sequences(offsets: list[int]) -> None:
    given = made(packed=(5,), dtype=torch.float32, state=False)
    with pytest.raises(flashvar.ShapeError, match="must rise from 0 to the number of rows, 5"):
        gated_delta_rule(**{**given, "cu_seqlens": torch.tensor(offsets)})


@pytest.mark.parametrize("wrong", [torch.tensor([[0, 5]]), torch.tensor(5), torch.tensor([])])
def test_offsets_of_another_kind(wrong: torch.Tensor) -> None:
    given = made(packed=(5,), dtype=torch.float32, state=False)
    with pytest.raises(flashvar.ShapeError, match=r"cu_seqlens must be \[sequences \+ 1\]"):
        gated_delta_rule(**{**given, "cu_seqlens": wrong})
    with pytest.raises(flashvar.DtypeError, match="int32 or int64"):
        gated_delta_rule(**{**given, "cu_seqlens": torch.tensor([0.0, 5.0])})
