"""`flashvar.compat.causal_conv1d`: the package's functions, over it and in its place."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

import flashvar
from flashvar.compat import causal_conv1d as ours
from flashvar.compat.stand_in import modules_of

LENGTHS = (4, 1, 6)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    ours.uninstall()


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor | None = None
) -> torch.Tensor:
    """By torch, of x [batch, dim, seqlen]."""
    if state is None:
        state = x.new_zeros(*x.shape[:2], weight.shape[1] - 1)
    return functional.silu(
        functional.conv1d(torch.cat((state, x), -1), weight[:, None], bias, groups=x.shape[1])
    )


def made(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[1], 4, dtype=torch.float64, requires_grad=True)
    return x, weight, torch.randn(shape[1], dtype=torch.float64, requires_grad=True)


SIGNATURES = {
    "causal_conv1d_fn": (
        "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, "
        "final_states_out=None, activation=None"
    ),
    "causal_conv1d_update": (
        "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, "
        "conv_state_indices=None"
    ),
    "causal_conv1d_varlen_states": "x, cu_seqlens, state_len",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(ours, name)).parameters.values()
    found = [
        x.name if x.default is x.empty else f"{x.name}={x.default}"
        for x in parameters
        if x.kind is x.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(found) == SIGNATURES[name]


@pytest.mark.parametrize("last", ["tokens", "channels"])
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
def test_values_and_gradients(given: bool, last: str) -> None:
    x, weight, bias = made(2, 6, 9)
    if last == "channels":
        x = x.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_()
    states = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True) if given else None
    leaves = [one for one in (x, weight, bias, states) if one is not None]
    wanted = convolved(x, weight, bias, states)
    found, final = ours.causal_conv1d_fn(x, weight, bias, None, states, True, activation="silu")
    torch.testing.assert_close(found, wanted)
    assert torch.equal(final, x[..., -3:])
    only = ours.causal_conv1d_fn(x, weight, bias, initial_states=states, activation="swish")
    assert torch.equal(only, found)
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(wanted, leaves, grad)
    )


def test_final_states_are_written_where_they_are_wanted() -> None:
    x, weight, bias = made(2, 6, 2)
    states = torch.randn(2, 6, 3, dtype=torch.float64)
    out = torch.empty(2, 3, 6, dtype=torch.float64).transpose(1, 2)
    _, final = ours.causal_conv1d_fn(x, weight, bias, None, states, True, out)
    assert final is out
    assert torch.equal(out, torch.cat((states[..., 2:], x), -1))
    (of_x,) = torch.autograd.grad(final.sum(), x)
    assert torch.equal(of_x, torch.ones_like(x))


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("by", ["seq_idx", "cu_seq_lens_q"])
def test_packed(by: str, padding: int) -> None:
    """Each sequence as if it were alone; tokens in front belong to the first."""
    x, weight, bias = made(1, 6, padding + sum(LENGTHS))
    parts = (LENGTHS[0] + padding, *LENGTHS[1:])
    wanted = torch.cat([convolved(part, weight, bias) for part in x.split(parts, -1)], -1)
    if by == "seq_idx":
        names = torch.arange(3).repeat_interleave(torch.tensor(parts))[None].int()
        options: dict[str, Any] = {"seq_idx": names}
    else:
        options = {by: torch.tensor([0, *LENGTHS]).cumsum(0).int()}
    found = ours.causal_conv1d_fn(x, weight, bias, activation="silu", **options)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("wrong", [[0, 5, 6], [1, 3], [0, 2, 1, 3]], ids=str)
def test_offsets_of_other_tokens_are_refused(wrong: list[int]) -> None:
    x, weight, bias = made(1, 6, 3)
    with pytest.raises(flashvar.ShapeError, match=r"cu_seq_lens_q must start at 0.* rows, 3, "):
        ours.causal_conv1d_fn(x, weight, bias, cu_seq_lens_q=torch.tensor(wrong))
    with pytest.raises(flashvar.InvalidInputError, match="cu_seq_lens_q must be a torch"):
        ours.causal_conv1d_fn(x, weight, bias, cu_seq_lens_q=wrong)


def test_names_of_fewer_tokens_go_behind_offsets() -> None:
    """A model passes both for its tokens, and x has the columns of its cache in front of them."""
    x, weight, bias = made(1, 6, 2 + sum(LENGTHS))
    names = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None].int()
    offsets = {"cu_seq_lens_q": torch.tensor([0, *LENGTHS]).cumsum(0).int()}
    found = ours.causal_conv1d_fn(x, weight, bias, names, **offsets)
    assert torch.equal(found, ours.causal_conv1d_fn(x, weight, bias, **offsets))
    more = torch.cat([names, names], 1)
    for wrong, others in ((names, {}), (more, offsets)):
        with pytest.raises(flashvar.ShapeError, match=r"seq_idx must be \[batch, seqlen\]"):
            ours.causal_conv1d_fn(x, weight, bias, wrong, **others)
    with pytest.raises(
        flashvar.InvalidInputError, match=r"seq_idx must be a torch\.Tensor, found list"
    ):
        ours.causal_conv1d_fn(x, weight, bias, names.tolist(), **offsets)


@pytest.mark.parametrize("columns", [3, 4, 6])
@pytest.mark.parametrize("rank", [2, 3])
def test_tokens_after_a_recorded_forward(columns: int, rank: int) -> None:
    """A model that decodes outside torch.no_grad() has the gradients of one long call."""
    leaves = made(2, 6, 9)
    x, weight, bias = leaves
    state = torch.zeros(2, 6, columns, dtype=torch.float64)
    state.copy_(functional.pad(x[..., :5], (columns, 0))[..., -columns:])
    found = [convolved(x[..., :5], weight, bias)]
    for part in x[..., 5:].split(1, -1):
        token = part.squeeze(-1) if rank == 2 else part
        y = ours.causal_conv1d_update(token, state, weight, bias, "silu")
        assert y.shape == token.shape
        found.append(y.view(part.shape))
    y, wanted = torch.cat(found, -1), convolved(x, weight, bias)
    torch.testing.assert_close(y, wanted)
    weights = torch.randn_like(y)
    grads = (torch.autograd.grad(one, leaves, weights, retain_graph=True) for one in (y, wanted))
    torch.testing.assert_close(*grads)
    assert torch.equal(state, functional.pad(x, (columns, 0))[..., -columns:])
    with pytest.raises(flashvar.InvalidInputError, match="state must not require a gradient"):
        ours.causal_conv1d_update(
            x[..., 0], state, weight, bias, conv_state_indices=torch.tensor([1, 0])
        )
    leaf = state.detach().requires_grad_()
    with pytest.raises(flashvar.InvalidInputError, match="state must not require a gradient"):
        ours.causal_conv1d_update(x[..., 0], leaf, weight, bias)


def test_compiled_after_a_recorded_forward() -> None:
    torch._dynamo.reset()
    x, weight, bias = made(2, 6, 2)

    def decoded(x: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = before.clone()
        return ours.causal_conv1d_update(x, state, weight, bias, "silu"), state

    before = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(decoded, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(x, before), decoded(x, before), strict=True):
        torch.testing.assert_close(found, wanted)
        grads = (
            torch.autograd.grad(one.sum(), before, retain_graph=True) for one in (found, wanted)
        )
        torch.testing.assert_close(*grads)


def test_tokens_one_by_one() -> None:
    x, weight, bias = (one.detach() for one in made(2, 6, 7))
    wanted = convolved(x, weight, bias)
    for columns in (3, 4, 6):
        pool = torch.zeros(5, 6, columns, dtype=torch.float64)
        ring = pool.clone()
        slots = torch.tensor([3, 0]).int()
        seen = torch.tensor([5, 11]).int()
        for t in range(7):
            for state, positions in ((pool, None), (ring, seen + t)):
                y = ours.causal_conv1d_update(
                    x[..., t], state, weight, bias, "silu", positions, slots
                )
                torch.testing.assert_close(y, wanted[..., t])
        several = torch.zeros(2, 6, columns, dtype=torch.float64)
        y = ours.causal_conv1d_update(x, several, weight, bias, "silu")
        torch.testing.assert_close(y, wanted)
        assert torch.equal(several, pool[[3, 0]])


def test_a_padding_slot_gives_zeros() -> None:
    x, weight, bias = (one.detach() for one in made(2, 6, 1))
    pool = torch.randn(3, 6, 3, dtype=torch.float64)
    before = pool.clone()
    slots = torch.tensor([-1, 1])
    y = ours.causal_conv1d_update(x, pool, weight, bias, conv_state_indices=slots)
    assert (y[0] == 0).all()
    assert torch.equal(pool[[0, 2]], before[[0, 2]])


def test_states_of_packed_sequences() -> None:
    x = torch.randn(sum(LENGTHS), 6)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    found = ours.causal_conv1d_varlen_states(x, ends, 4)
    assert found.shape == (3, 6, 4)
    for one, (a, b) in zip(found, pairwise(ends.tolist()), strict=True):
        kept = min(b - a, 4)
        assert torch.equal(one[:, 4 - kept :], x[b - kept : b].T)
        assert (one[:, : 4 - kept] == 0).all()


def test_refusals() -> None:
    x, weight, bias = made(1, 6, 5)
    names = torch.zeros(1, 5, dtype=torch.int32)
    with pytest.raises(flashvar.InvalidInputError, match="found return_final_state too"):
        ours.causal_conv1d_fn(x, weight, bias, names, return_final_states=True)
    with pytest.raises(flashvar.InvalidInputError, match="activation must be one of"):
        ours.causal_conv1d_fn(x, weight, bias, activation="gelu")
    with pytest.raises(flashvar.ShapeError, match=r"\(1, 6, 3\), found \(2, 6, 3\)"):
        ours.causal_conv1d_fn(x, weight, bias, None, None, True, torch.zeros(2, 6, 3))
    with pytest.raises(flashvar.ShapeError, match=r"rows, 5, found \[0, 6\]"):
        ours.causal_conv1d_varlen_states(x[0].T, torch.tensor([0, 6]), 2)
    with pytest.raises(flashvar.InvalidInputError, match="state_len must be a whole number"):
        ours.causal_conv1d_varlen_states(x[0].T, torch.tensor([0, 5]), -1)
    with pytest.raises(flashvar.ShapeError, match="x must be packed"):
        ours.causal_conv1d_varlen_states(x, torch.tensor([0, 5]), 2)


def test_stands_in() -> None:
    ours.provide()
    ours.provide()
    with pytest.raises(flashvar.IntegrationError, match=r"stand-in .* leave install\(\) out"):
        ours.install()
    package = importlib.import_module("causal_conv1d")
    assert package.causal_conv1d_fn is ours.causal_conv1d_fn
    interface = importlib.import_module("causal_conv1d.causal_conv1d_interface")
    assert interface.causal_conv1d_update is ours.causal_conv1d_update
    assert package.__version__ == metadata.version("causal-conv1d") == ours.__version__
    with pytest.raises(flashvar.NotProvidedError, match="causal_conv1d_other is not in flashvar's"):
        importlib.import_module("causal_conv1d.causal_conv1d_other")
    ours.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] == "causal_conv1d"]


@pytest.mark.parametrize("written_by", ["caller", "function"])
@pytest.mark.parametrize(
    ("packed", "with_states"), [(False, True), (True, False), (True, True)], ids=str
)
def test_below_autograd(packed: bool, with_states: bool, written_by: str) -> None:
    """As mamba-ssm calls them."""
    below = importlib.import_module("flashvar.compat.causal_conv1d.cpp_functions")
    x, weight, bias = made(2, 6, 7)
    states = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True) if with_states else None
    names = torch.tensor([[0, 0, 0, 1, 1, 2, -1], [3, 4, 4, 4, 4, -1, -1]]) if packed else None
    written = None if packed else torch.empty(2, 6, 3, dtype=torch.float64)
    out = below.causal_conv1d_fwd_function(x, weight, bias, names, states, written, True)
    assert not out.requires_grad
    wanted = ours.causal_conv1d_fn(*(x, weight, bias, names, states, not packed), activation="silu")
    results = (wanted,) if packed else wanted
    assert torch.equal(out, results[0])
    assert written is None or torch.equal(written, results[1])
    grads = [torch.randn_like(one) for one in results]
    dout, dfinal = (grads[0], None) if packed else grads
    if packed:
        dout[names[:, None].expand_as(dout) < 0] = torch.nan
    leaves = [one for one in (x, weight, bias, states) if one is not None]
    dx = torch.empty_like(x).mT.contiguous().mT if written_by == "caller" else None
    found = below.causal_conv1d_bwd_function(
        *(x, weight, bias, dout, names, states, dfinal, dx, with_states, True)
    )
    assert dx is None or found[0] is dx
    assert (found[3] is None) is not with_states
    wanted_grads = torch.autograd.grad(results, leaves, grads)
    torch.testing.assert_close(found[: len(leaves)], wanted_grads)
    none = below.causal_conv1d_bwd_function(*(x, weight, None, dout, names, states), *[None] * 4)
    assert none[2:] == (None, None)


def test_update_below_autograd() -> None:
    below = importlib.import_module("flashvar.compat.causal_conv1d.cpp_functions")
    x, weight, bias = made(2, 6, 2)
    pool = torch.randn(4, 6, 5, dtype=torch.float64)
    other, slots, seen = pool.clone(), torch.tensor([3, 1]), torch.tensor([4, 9])
    y = below.causal_conv1d_update_function(x, pool, weight, bias, True, seen, slots)
    plain = [one.detach() for one in (x, weight, bias)]
    wanted = ours.causal_conv1d_update(plain[0], other, *plain[1:], "silu", seen, slots)
    assert torch.equal(y, wanted)
    assert torch.equal(pool, other)


@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("activation", [None, "swish"])
def test_written_out(activation: str | None, width: int) -> None:
    """What tests of the package compare with: another computation, the same results."""
    ours.provide()
    interface = importlib.import_module("causal_conv1d.causal_conv1d_interface")
    varlen = importlib.import_module("causal_conv1d.causal_conv1d_varlen")
    x, _, bias = made(2, 6, 7)
    weight = torch.randn(6, width, dtype=torch.float64, requires_grad=True)
    states = torch.randn(2, 6, width - 1, dtype=torch.float64, requires_grad=True)
    for state, leaves in ((None, (x, weight, bias)), (states, (x, weight, bias, states))):
        options = {"initial_states": state, "return_final_states": True, "activation": activation}
        wanted, after = interface.causal_conv1d_ref(x, weight, bias, **options)
        found, final = ours.causal_conv1d_fn(x, weight, bias, **options)
        torch.testing.assert_close(found, wanted)
        assert torch.equal(final, after)
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves)
        )
    x, weight, bias = (one.detach() for one in (x, weight, bias))
    for tokens in (x, x[..., 0]):
        for seen in (None, torch.tensor([1, 8], dtype=torch.int32)):
            pools = [torch.randn(2, 6, 5, dtype=torch.float64)]
            pools.append(pools[0].clone())
            found, wanted = (
                update(tokens, pool, weight, bias, activation, seen)
                for update, pool in zip(
                    (ours.causal_conv1d_update, interface.causal_conv1d_update_ref),
                    pools,
                    strict=True,
                )
            )
            torch.testing.assert_close(found, wanted)
            assert torch.equal(*pools)
    ends = torch.tensor([0, 5, 5, 7])
    assert torch.equal(
        varlen.causal_conv1d_varlen_states(x[0].T, ends, 3),
        varlen.causal_conv1d_varlen_states_ref(x[0].T, ends, 3),
    )
    for function in (varlen.causal_conv1d_varlen_states, varlen.causal_conv1d_varlen_states_ref):
        gradient = torch.func.grad(lambda x, f=function: f(x[0].T, ends, 3).sum())(x)
        assert gradient[0].sum(0).tolist() == [0, 0, 6, 6, 6, 6, 6]


def test_over_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(flashvar.IntegrationError, match="call provide"):
        ours.install()

    def original() -> None:
        """Another one."""

    names = dict.fromkeys(("causal_conv1d_fn", "causal_conv1d_update"), original)
    functions = {name: type(original)(original.__code__, {}) for name in SIGNATURES}
    for name, function in functions.items():
        function.__module__, function.__qualname__ = "causal_conv1d", name  # for pickles
    interface = {name: functions[name] for name in names}
    varlen = {"causal_conv1d_varlen_states": functions["causal_conv1d_varlen_states"]}
    modules = modules_of(
        {
            "causal_conv1d": interface,
            "causal_conv1d.causal_conv1d_interface": interface,
            "causal_conv1d.causal_conv1d_varlen": varlen,
            "a_model": {"conv": interface["causal_conv1d_fn"]},
        }
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(flashvar.ConfigurationError, match=r"call install\(\)"):
        ours.provide()
    ours.install()
    x, weight, bias = made(1, 6, 5)
    wanted = ours.causal_conv1d_fn(x, weight, bias)
    assert torch.equal(modules["a_model"].conv(x, weight, bias), wanted)
    assert inspect.signature(modules["a_model"].conv) == inspect.signature(ours.causal_conv1d_fn)
    kept = pickle.dumps(modules["a_model"].conv)
    assert pickle.loads(kept) is modules["a_model"].conv
    ours.uninstall()
    assert pickle.loads(kept) is functions["causal_conv1d_fn"]
    assert modules["a_model"].conv is functions["causal_conv1d_fn"]
    assert (
        modules["causal_conv1d.causal_conv1d_varlen"].__dict__["causal_conv1d_varlen_states"]
        is functions["causal_conv1d_varlen_states"]
    )
