"""Packed sequences that `seq_idx` names token by token."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import flashvar
from flashvar.ops.causal_conv1d.api import causal_conv1d
from flashvar.ops.causal_conv1d.sequence_ids import last_tokens

LENGTHS = ((4, 0, 1, 5), (10,), (1, 1, 8))
IDS = torch.stack(
    [torch.arange(len(x)).repeat_interleave(torch.tensor(x)) for x in LENGTHS]
).int()  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def made() -> dict[str, torch.Tensor]:
    shapes = {"x": (3, 10, 6), "weight": (6, 4), "bias": (6,), "residual": (3, 10, 6)}
    return {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }


def alone(given: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    rows = []
    for i, lengths in enumerate(LENGTHS):
        parts = zip(
            given["x"][i : i + 1].split(lengths, 1),
            given["residual"][i : i + 1].split(lengths, 1),
            strict=True,
        )
        rows += [
            torch.cat(
                [
                    causal_conv1d(x, given["weight"], given["bias"], residual=r, **options)
                    for x, r in parts
                ],
                1,
            )
        ]
    return torch.cat(rows)


@pytest.mark.parametrize("layout", ["btd", "bdt"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_each_sequence_is_alone(index: torch.dtype, layout: str) -> None:
    given = made()
    wanted = alone(given, activation="silu")
    called = dict(given)
    if layout == "bdt":
        called |= {name: given[name].transpose(1, 2) for name in ("x", "residual")}
    found = causal_conv1d(**called, activation="silu", seq_idx=IDS.to(index), layout=layout)
    assert found.shape == called["x"].shape
    found = found if layout == "btd" else found.transpose(1, 2)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    of_found = torch.autograd.grad(found, list(given.values()), grad)
    torch.testing.assert_close(of_found, torch.autograd.grad(wanted, list(given.values()), grad))


@pytest.mark.parametrize("layout", ["btd", "bdt"])
@pytest.mark.parametrize("columns", [3, 5])
def test_a_state_precedes_the_first_sequence(columns: int, layout: str) -> None:
    """As in causal-conv1d, also in its gradients; where padding comes first, nothing reads it."""
    given = made()
    state = torch.randn(3, 6, columns, dtype=torch.float64, requires_grad=True)
    ids = IDS.clone()
    ids[1, 0] = -1
    wanted = causal_conv1d(**given, seq_idx=ids, activation="silu").clone()
    for i in (0, 2):  # the first sequences of these rows
        end = LENGTHS[i][0]
        first = {n: x if x.dim() < 3 else x[i : i + 1, :end] for n, x in given.items()}
        wanted[i, :end] = causal_conv1d(
            **first, initial_state=state[i : i + 1], activation="silu"
        )[0]  # fmt: skip
    called = dict(given)
    if layout == "bdt":
        called |= {name: given[name].transpose(1, 2) for name in ("x", "residual")}
    found = causal_conv1d(
        **called, initial_state=state, seq_idx=ids, activation="silu", layout=layout
    )
    found = found if layout == "btd" else found.transpose(1, 2)
    torch.testing.assert_close(found, wanted)
    leaves, grad = [*given.values(), state], torch.randn_like(wanted)
    of_found = torch.autograd.grad(found, leaves, grad)
    torch.testing.assert_close(of_found, torch.autograd.grad(wanted, leaves, grad))
    assert (of_found[-1][1] == 0).all()


def test_a_state_with_more_digits_than_x() -> None:
    given = {name: x.detach().bfloat16() for name, x in made().items()}
    state = torch.randn(3, 6, 3)
    found = causal_conv1d(**given, initial_state=state, seq_idx=torch.zeros(3, 10).int())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, causal_conv1d(**given, initial_state=state))


def test_a_state_before_no_tokens() -> None:
    x, state = torch.ones(2, 0, 6), torch.ones(2, 6, 3, requires_grad=True)
    ids = torch.zeros(2, 0, dtype=torch.int32)
    found = causal_conv1d(x, torch.ones(6, 4), initial_state=state, seq_idx=ids)
    assert found.shape == (2, 0, 6)
    found.sum().backward()
    assert state.grad is not None
    assert (state.grad == 0).all()


def in_memory(order: tuple[int, ...]) -> torch.Tensor:
    """x whose dimensions are in this order in memory, the last one innermost."""
    x = torch.randn(3, 10, 6).permute(order).contiguous()
    return x.permute([order.index(dim) for dim in range(3)])


STRIDES = {
    **{f"order {order}": in_memory(order) for order in permutations(range(3))},
    "one row for all": torch.randn(1, 10, 6).expand(3, 10, 6),
    "one channel for all": torch.randn(3, 10, 1).expand(3, 10, 6),
    "apart": torch.randn(3, 10, 12)[..., ::2],
    "apart, batch innermost": torch.randn(10, 6, 9)[..., ::3].permute(2, 0, 1),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("layout", ["btd", "bdt"])
@pytest.mark.parametrize("x", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("with_state", [False, True], ids=["", "state"])
def test_the_output_has_the_strides_of_x(with_state: bool, x: torch.Tensor, layout: str) -> None:
    """As without seq_idx; in fake tensors and with tangents too."""
    state = torch.randn(3, 6, 3) if with_state else None
    given = x if layout == "btd" else x.mT

    def call(x: torch.Tensor, ids: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        return causal_conv1d(x, torch.ones(6, 4), initial_state=state, seq_idx=ids, layout=layout)

    wanted = causal_conv1d(given, torch.ones(6, 4), layout=layout).stride()
    assert wanted == torch.empty_like(given).stride()
    assert call(given, IDS, state).stride() == wanted
    with FakeTensorMode() as mode:
        fakes = [None if one is None else mode.from_tensor(one) for one in (given, IDS, state)]
        assert call(*fakes).stride() == wanted
    with forward_ad.dual_level():
        assert call(forward_ad.make_dual(given, given), IDS, state).stride() == wanted


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["order (1, 2, 0)", "apart, batch innermost"])
def test_the_output_of_a_graph_has_the_strides_of_x(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    x, weight = STRIDES[name], torch.ones(6, 4)
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert compiled(x, weight, seq_idx=IDS).stride() == torch.empty_like(x).stride()


def test_padding_gives_zeros_and_takes_no_gradient() -> None:
    given = made()
    ids = IDS.clone()
    ids[0, :4] = -1
    ids[2, 9] = -7
    found = causal_conv1d(**given, seq_idx=ids)
    assert (found[ids < 0] == 0).all()
    kept = ids >= 0
    kept[2, :] = True
    kept[2, 9] = False
    torch.testing.assert_close(found[kept], alone(given)[kept])
    found.sum().backward()
    assert given["residual"].grad is not None
    assert (given["residual"].grad[ids < 0] == 0).all()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_padding_may_hold_nan(activation: str | None) -> None:
    given = made()
    ids = IDS.clone()
    ids[0, :4] = -1
    wanted = causal_conv1d(**given, seq_idx=ids, activation=activation)
    nan = {n: x.detach().clone().requires_grad_() for n, x in given.items()}
    with torch.no_grad():
        for name in ("x", "residual"):
            nan[name][ids < 0] = torch.nan
    found = causal_conv1d(**nan, seq_idx=ids, activation=activation)
    assert torch.equal(found, wanted)
    grad = torch.randn_like(wanted)
    of_found = torch.autograd.grad(found, list(nan.values()), grad)
    torch.testing.assert_close(of_found, torch.autograd.grad(wanted, list(given.values()), grad))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced(mode: str) -> None:
    given = {name: x.detach() for name, x in made().items()}

    def call(ids: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(**given, seq_idx=ids)

    traced = make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(IDS)
    torch.testing.assert_close(traced(IDS), call(IDS))


def test_compiled_without_a_break() -> None:
    torch._dynamo.reset()
    given = {name: x.detach() for name, x in made().items()}

    def call(ids: torch.Tensor, **tensors: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(**tensors, seq_idx=ids) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS, **given), call(IDS, **given))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_linearized() -> None:
    given = {name: x.detach() for name, x in made().items()}

    def call(x: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(**(given | {"x": x}), activation="silu", seq_idx=IDS)

    tangent = torch.randn_like(given["x"])
    _, linear = torch.func.linearize(call, given["x"])
    _, wanted = torch.func.jvp(call, (given["x"],), (tangent,))
    torch.testing.assert_close(linear(tangent), wanted)


STATE = torch.zeros(3, 6, 3, dtype=torch.float64)
REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": ({"seq_idx": [0]}, flashvar.InvalidInputError, "found list"),
    "shape": ({"seq_idx": IDS[:2]}, flashvar.ShapeError, "found (2, 10) with (3, 10, 6)"),
    "dtype": ({"seq_idx": IDS.float()}, flashvar.DtypeError, "found torch.float32"),
    "offsets": (
        {"cu_seqlens": torch.tensor([0, 10])}, flashvar.InvalidInputError, "found cu_seqlens too"
    ),
    "a state of each sequence": (
        {"initial_state": torch.zeros(6, 6, 3).double()},
        flashvar.ShapeError,
        "must be [3, 6, 3 or more columns]",
    ),
    "a state of another dtype": (
        {"initial_state": STATE.float()},
        flashvar.DtypeError,
        "initial_state must be float64",
    ),
    "a number of columns": (
        {"state_len": False}, flashvar.InvalidInputError, "found state_len too"
    ),
    "final": (
        {"return_final_state": True}, flashvar.InvalidInputError, "found return_final_state too"
    ),
    "residual": (
        {"residual": torch.randn(3, 6, 10).double()},
        flashvar.ShapeError,
        "the shape of x, (3, 10, 6)",
    ),
    "columns": ({"state_len": 3}, flashvar.InvalidInputError, "found state_len too"),
    "apart": (
        {"seq_idx": torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0, 0, 0]] * 3)},
        flashvar.InvalidInputError,
        "found 0 in two places",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "kind", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(changed: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        causal_conv1d(**(made() | {"seq_idx": IDS} | changed))
    assert words in str(caught.value)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_last_tokens(count: int) -> None:
    x = torch.randn(9, 5)
    found = last_tokens(x, torch.tensor([0, 4, 4, 9]), count)
    for i, part in enumerate((x[:4], x[4:4], x[4:])):
        padded = torch.cat((torch.zeros(count, 5), part))[len(part) :]
        assert torch.equal(found[i], padded[-count:].T)
