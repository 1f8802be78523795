"""causal_conv1d_update on the CPU: values, states in place, pools with indices, derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from causal_conv1d_oracle import convolved

import flashvar
from flashvar.ops.causal_conv1d.api import causal_conv1d, causal_conv1d_update
from flashvar.ops.causal_conv1d.torch_library import causal_conv1d_update as op

OPCHECK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def made(
    batch: int = 3,
    seqlen: int = 1,
    columns: int = 3,
    dtype: torch.dtype = torch.float64,
    width: int = 4,
) -> dict[str, torch.Tensor]:
    """With 5 channels and as many states as sequences."""
    shapes = {
        "x": (batch, seqlen, 5),
        "state": (batch, 5, columns),
        "weight": (5, width),
        "bias": (5,),
        "residual": (batch, seqlen, 5),
    }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "columns"), [(4, 3), (4, 4), (4, 9), (7, 6), (7, 7)])
@pytest.mark.parametrize("seqlen", [1, 2, 7])
def test_values(seqlen: int, width: int, columns: int, dtype: torch.dtype) -> None:
    given = made(seqlen=seqlen, columns=columns, dtype=dtype, width=width)
    before = given["state"].clone()
    y = causal_conv1d_update(**given, activation="silu")
    eps = torch.finfo(dtype).eps
    for i in range(3):
        wanted, final = convolved(
            given["x"][i], given["weight"], given["bias"], given["residual"][i], before[i],
            silu=True, columns=columns,
        )  # fmt: skip
        torch.testing.assert_close(y[i].double(), wanted, atol=16 * min(eps, 1e-6), rtol=eps)
        assert torch.equal(given["state"][i].double(), final)


def test_decoding_is_one_long_call() -> None:
    given = made(seqlen=8)
    x, state = given["x"], given["state"]
    whole, last = causal_conv1d(
        x, given["weight"], given["bias"], activation="swish", initial_state=state,
        return_final_state=True,
    )  # fmt: skip
    tokens = [
        causal_conv1d_update(x[:, t], state, given["weight"], given["bias"], activation="swish")
        for t in range(8)
    ]
    # To the last bit or one off: a CPU's vector code for exp is not its code for what is left over.
    torch.testing.assert_close(torch.stack(tokens, 1), whole, rtol=1e-14, atol=1e-14)
    assert torch.equal(state, last)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("layout", ["btd", "bdt"])
def test_a_pool(layout: str, rank: int, index: torch.dtype) -> None:
    given = made()
    x, state, residual = (given.pop(name) for name in ("x", "state", "residual"))
    pool = torch.randn(6, 5, 3, dtype=torch.float64)
    slots = [4, -1, 0]
    for i in (0, 2):
        pool[slots[i]] = state[i]
    untouched = pool.clone()
    wanted = causal_conv1d_update(x, state, **given, residual=residual)
    if rank == 2:
        x, residual = x[:, 0], residual[:, 0]
    elif layout == "bdt":
        x, residual = x.transpose(1, 2), residual.transpose(1, 2)
    y = causal_conv1d_update(
        x, pool, **given, residual=residual, layout=layout,
        state_indices=torch.tensor(slots, dtype=index),
    )  # fmt: skip
    assert y.shape == x.shape
    y = y.reshape(3, 5)
    assert torch.equal(y[[0, 2]], wanted[[0, 2], 0])
    assert (y[1] == 0).all()
    for i in range(6):
        expected = state[slots.index(i)] if i in (0, 4) else untouched[i]
        assert torch.equal(pool[i], expected)


@pytest.mark.parametrize("pooled", [False, True], ids=["batch", "pool"])
@pytest.mark.parametrize(("columns", "steps"), [(3, (1, 1, 1, 1)), (5, (2, 1, 9, 3)), (8, (1, 4))])
def test_circular_states(columns: int, steps: tuple[int, ...], pooled: bool) -> None:
    """Whatever the steps are, as one call without circular states, from zeros."""
    given = made(seqlen=sum(steps), columns=columns)
    given.pop("state")
    wanted = causal_conv1d(**given, activation="silu")
    state = torch.zeros(4 if pooled else 3, 5, columns, dtype=torch.float64)
    indices = torch.tensor([2, 3, 0]) if pooled else None
    seen = torch.tensor([0, 3, 2 * columns])  # what a sequence has seen, of which all is zeros
    parts = []
    for x, residual in zip(
        given["x"].split(steps, 1), given["residual"].split(steps, 1), strict=True
    ):
        before, column = state.clone(), torch.arange(columns)
        parts.append(
            causal_conv1d_update(
                x, state, given["weight"], given["bias"], activation="silu",
                residual=residual, state_indices=indices, state_positions=seen,
            )
        )  # fmt: skip
        for i, slot in enumerate(range(3) if indices is None else indices.tolist()):
            written = (column - seen[i]) % columns < x.shape[1]
            assert torch.equal(state[slot][:, ~written], before[slot][:, ~written])
            newest = (seen[i] + x.shape[1] - 1) % columns
            assert torch.equal(state[slot][:, newest], x[i, -1])
        seen = seen + x.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), wanted)


def test_no_derivatives() -> None:
    given = made(dtype=torch.float32)
    given["weight"].requires_grad_()
    y = causal_conv1d_update(**given)
    with pytest.raises(flashvar.BackendUnavailableError, match="has no derivatives"):
        y.sum().backward()
    given["state"].requires_grad_()
    with pytest.raises(flashvar.InvalidInputError, match="detach it"):
        causal_conv1d_update(**given)
    with torch.no_grad():
        assert not causal_conv1d_update(**given).requires_grad


def test_a_backward_that_kept_the_state_refuses() -> None:
    given = made(dtype=torch.float32)
    weight = given["weight"].requires_grad_()
    y = causal_conv1d(given["x"], weight, initial_state=given["state"])
    with torch.no_grad():
        causal_conv1d_update(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_vmap_is_refused() -> None:
    given = made(dtype=torch.float32)
    with pytest.raises(flashvar.InvalidInputError, match=r"found torch\.vmap over it"):
        torch.vmap(lambda x: causal_conv1d_update(x, given["state"], given["weight"]))(
            given["x"][None]
        )


@OPCHECK
@pytest.mark.parametrize("pooled", [False, True], ids=["batch", "pool"])
def test_opcheck(pooled: bool) -> None:
    given = made(dtype=torch.float32)
    indices = torch.tensor([2, -1, 0]) if pooled else None
    torch.library.opcheck(op, (*given.values(), indices, None, True, "btd", "auto"))


def test_compiled() -> None:
    torch._dynamo.reset()

    def step(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return causal_conv1d_update(x * 2, state, weight, activation="silu") + state.sum()

    given = made(dtype=torch.float32)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, step):
        state = given["state"].clone()
        results.append((call(given["x"], state, given["weight"]), state))
    torch.testing.assert_close(*results)


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"x": torch.randn(5)}, flashvar.ShapeError, "found (5,): unsqueeze"),
    "states": ({"state": torch.randn(2, 5, 3)}, flashvar.ShapeError, "must be [3, 5, 3 or more"),
    "columns": ({"state": torch.randn(3, 5, 2)}, flashvar.ShapeError, "found (3, 5, 2)"),
    "state and weight swapped": (
        {"x": torch.randn(3, 5), "residual": None, "state": torch.randn(5, 4)}
        | {"weight": torch.randn(3, 5, 3)},
        flashvar.ShapeError,
        "for x (3, 5), found (3, 5, 3): pass x, state and weight in this order",
    ),
    "conv1d's weight": (
        {"weight": torch.randn(5, 1, 4)}, flashvar.ShapeError, "found (5, 1, 4): squeeze"
    ),
    "expanded": (
        {"state": torch.randn(1, 5, 3).expand(3, 5, 3)}, flashvar.LayoutError,
        "found strides (0, 3, 1)",
    ),
    "expanded in part": (
        {"state": torch.randn(60).as_strided((3, 5, 3), (14, 3, 1))}, flashvar.LayoutError,
        "found strides (14, 3, 1)",
    ),
    "no state": ({"state": None}, flashvar.InvalidInputError, "state must be a torch.Tensor"),
    "residual": ({"residual": torch.randn(3, 5)}, flashvar.ShapeError, "the shape of x, (3, 1, 5)"),
    "indices": ({"state_indices": torch.tensor([0])}, flashvar.ShapeError, "(3,), found (1,)"),
    "positions": (
        {"state_positions": torch.tensor([0])}, flashvar.ShapeError, "state_positions must be ["
    ),
    "dtype of positions": (
        {"state_positions": torch.zeros(3)}, flashvar.DtypeError, "state_positions must be int32"
    ),
    "their dtype": (
        {"state_indices": torch.zeros(3)}, flashvar.DtypeError, "int32 or int64, found torch.float"
    ),
    "beyond": (
        {"state_indices": torch.tensor([0, 1, 3])}, flashvar.ShapeError, "below the 3 states of"
    ),
    "twice": (
        {"state_indices": torch.tensor([1, -1, 1])}, flashvar.InvalidInputError, "found 1 more"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "kind", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(changed: dict[str, Any], kind: type[Exception], words: str) -> None:
    given = made(dtype=torch.float32) | changed
    before = None if given["state"] is None else given["state"].clone()
    with pytest.raises(kind) as caught:
        causal_conv1d_update(**given)
    assert words in str(caught.value)
    assert before is None or torch.equal(given["state"], before)
