"""torch.vmap over any dimension of any tensor, against a loop over its entries: with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.func import grad, vmap

import flashvar
from flashvar.compat.flash_attn.layers.rotary import apply_rotary_emb
from flashvar.layers.norms import rms_norm

SIZE = 3
BATCH, SEQLEN, HEADS, DIM = 2, 5, 2, 8
ROWS = (BATCH, SEQLEN, HEADS, DIM)
GATES = ROWS[:3]
CHANNELS = (BATCH, SEQLEN, DIM)
IDS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, -1, -1]])

Call = Callable[..., Any]
# A function of tensors, and the shapes of these.
CALLS: dict[str, tuple[Call, tuple[tuple[int, ...], ...]]] = {
    "attention": (
        lambda q, k, v: flashvar.attention(q, k, v, causal=True, return_lse=True),
        (ROWS, ROWS, ROWS),
    ),
    "attention, padded": (
        lambda q, k, v: flashvar.attention(q, k, v, layout="bhsd"),
        ((BATCH, HEADS, SEQLEN, 7),) * 3,
    ),
    "attention with a bias": (
        lambda q, bias: flashvar.attention(q, q, q, bias=bias),
        (ROWS, (1, HEADS, SEQLEN, SEQLEN)),
    ),
    "attention with slopes": (
        lambda q, slopes: flashvar.attention(q, q, q, alibi_slopes=slopes.detach()),
        (ROWS, (BATCH, HEADS)),
    ),
    "attention with sinks": (
        lambda q, sinks: flashvar.attention(q, q, q, sinks=sinks),
        (ROWS, (HEADS,)),
    ),
    "merge_states": (
        lambda out, out2, lse: flashvar.merge_states([out, out2], [lse, 2 * lse]),
        (ROWS, ROWS, (BATCH, HEADS, SEQLEN)),
    ),
    "merge_states, stacked": (flashvar.merge_states, ((2, *ROWS), (2, BATCH, HEADS, SEQLEN))),
    "gated_delta_rule": (
        lambda q, k, v, g, beta, state: flashvar.gated_delta_rule(
            q, k, v, -g, beta, initial_state=state, return_final_state=True
        ),
        (ROWS, ROWS, ROWS, GATES, GATES, (BATCH, HEADS, DIM, DIM)),
    ),
    "causal_conv1d": (
        lambda x, weight, bias, state: flashvar.causal_conv1d(
            x, weight, bias, activation="silu", initial_state=state, return_final_state=True
        ),
        (CHANNELS, (DIM, 4), (DIM,), (BATCH, DIM, 3)),
    ),
    "causal_conv1d with seq_idx": (
        lambda x, weight: flashvar.causal_conv1d(x.mT, weight, seq_idx=IDS, layout="bdt"),
        (CHANNELS, (DIM, 4)),
    ),
    "rms_norm": (
        lambda x, weight, bias, residual: rms_norm(x, weight, bias, residual, prenorm=True),
        (CHANNELS, (DIM,), (DIM,), CHANNELS),
    ),
    "rotary": (apply_rotary_emb, (ROWS, (SEQLEN, DIM // 2), (SEQLEN, DIM // 2))),
}


def places() -> Iterator[Any]:
    """Each tensor mapped at each place, alone and beside others that are mapped in front."""
    for name, (_, shapes) in CALLS.items():
        for index, shape in enumerate(shapes):
            for dim in range(len(shape) + 1):
                for others in (0, None):
                    dims = [others] * len(shapes)
                    dims[index] = dim
                    yield pytest.param(name, tuple(dims), id=f"{name} {dims}")


def made(name: str, dims: tuple[int | None, ...]) -> tuple[list[Any], list[torch.Tensor]]:
    """The tensors of each entry, and those of vmap: the mapped dimension in its place in memory."""
    torch.manual_seed(0)
    mapped = [
        0.1 + 0.5 * torch.rand(*([] if dim is None else [SIZE]), *shape)
        for shape, dim in zip(CALLS[name][1], dims, strict=True)
    ]
    entries = [
        [x if dim is None else x[i] for x, dim in zip(mapped, dims, strict=True)]
        for i in range(SIZE)
    ]
    moved = [
        x if dim is None else x.movedim(0, dim).contiguous()
        for x, dim in zip(mapped, dims, strict=True)
    ]
    return entries, moved


def results(call: Call) -> Call:
    """The results of a call, always several."""

    def called(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = call(*tensors)
        return found if isinstance(found, tuple) else (found,)

    return called


def loss(call: Call) -> Call:
    return lambda *tensors: sum((x * x).sum() for x in results(call)(*tensors))


@pytest.mark.parametrize(("name", "dims"), [*places()])
def test_every_place(name: str, dims: tuple[int | None, ...]) -> None:
    entries, tensors = made(name, dims)
    call = CALLS[name][0]
    for function in (results(call), grad(loss(call), tuple(range(len(dims))))):
        expected = [torch.stack(of) for of in zip(*[function(*x) for x in entries], strict=True)]
        found = vmap(function, dims)(*tensors)
        torch.testing.assert_close(list(found), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["", "gradients"])
def test_rows_that_are_mapped_last_in_a_graph(inside: bool) -> None:
    """A batch of 1: torch folds the mapped dimension into it without a copy."""
    torch._dynamo.reset()
    q = torch.randn(1, *ROWS[1:], SIZE)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return flashvar.attention(q, q, q)

    mapped = vmap(grad(loss(attend)) if inside else attend, -1)
    compiled = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), mapped(q))


def test_two_maps_whose_dimensions_are_last() -> None:
    q = torch.randn(*ROWS, 2, SIZE)
    found = vmap(vmap(lambda q: flashvar.attention(q, q, q), -1), -1)(q)
    for i in range(SIZE):
        for j in range(2):
            one = q[..., j, i].contiguous()
            torch.testing.assert_close(found[i, j], flashvar.attention(one, one, one))


def test_tensors_that_all_entries_share_are_refused_as_without_vmap() -> None:
    q, k = torch.randn(SIZE, *ROWS), torch.randn(*ROWS, 2)[..., 0]
    with pytest.raises(flashvar.LayoutError, match="k must be contiguous in its last dimension"):
        vmap(lambda q: flashvar.attention(q, k, k))(q)
