"""`memory_efficient_attention` with xformers' signature; masks by classes named as its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashvar.errors import InvalidInputError, LayoutError, ShapeError
from flashvar.integrations.xformers import attention as xformers_attention
from flashvar.integrations.xformers import memory_efficient_attention

B, M, N, H, K = 2, 6, 9, 4, 16


def mask(kind: str, **facts: Any) -> Any:
    return type(kind, (SimpleNamespace,), {})(**facts)


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, scale: float | None = None
) -> torch.Tensor:
    """Attention written out, of [batch, sequence, heads, head_dim]."""
    scores = torch.einsum("bmhk,bnhk->bhmn", q, k) * (q.shape[-1] ** -0.5 if scale is None else 1)
    if scale is not None:
        scores = scores * scale
    return torch.einsum("bhmn,bnhk->bmhk", (scores + bias).softmax(-1), v)


def hidden(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def diagonals(offset: int) -> torch.Tensor:
    """Key minus the diagonal key of the query."""
    return torch.arange(N) - torch.arange(M)[:, None] - offset


MASKS = {
    "none": (None, torch.zeros(())),
    "top-left": (mask("LowerTriangularMask"), hidden(diagonals(0) <= 0)),
    "bottom-right": (mask("LowerTriangularFromBottomRightMask"), hidden(diagonals(3) <= 0)),
    "window": (
        mask("LocalAttentionFromBottomRightMask", window_left=2, window_right=1),
        hidden((diagonals(3) >= -2) & (diagonals(3) <= 1)),
    ),
    "causal-window": (
        mask("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=3),
        hidden((diagonals(3) > -3) & (diagonals(3) <= 0)),
    ),
}


@pytest.mark.parametrize(("attn_bias", "bias"), MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("scale", [None, 0.4])
def test_masks(attn_bias: Any, bias: torch.Tensor, scale: float | None) -> None:
    q, k, v = made(B, M, H, K), made(B, N, H, K), made(B, N, H, K)
    out = memory_efficient_attention(q, k, v, attn_bias, scale=scale)
    torch.testing.assert_close(out, oracle(q, k, v, bias, scale))


@pytest.mark.parametrize("shape", [(B, H, M, N), (1, 1, M, N), (1, H, 1, N)], ids=str)
def test_a_tensor_as_bias(shape: tuple[int, ...]) -> None:
    q, k, v, bias = made(B, M, H, K), made(B, N, H, K), made(B, N, H, K), made(*shape)
    bias.requires_grad_()
    expected = oracle(q, k, v, bias)
    found = memory_efficient_attention(q, k, v, bias)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x.square().sum(), bias)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads)


def test_three_dimensions() -> None:
    q, k, v, bias = made(B, M, K), made(B, N, K), made(B, N, K), made(B, M, N)
    expected = oracle(q[:, :, None], k[:, :, None], v[:, :, None], bias[:, None])[:, :, 0]
    torch.testing.assert_close(memory_efficient_attention(q, k, v, bias), expected)


@pytest.mark.parametrize("kept", ["leaf", "view of a leaf", "view of a view", "retained"])
@pytest.mark.parametrize("place", [1, 2], ids=["key", "value"])
def test_gradients_of_expanded_heads(place: int, kept: str) -> None:
    q, (k, v) = made(B, M, 2, 3, K), made(2, B, N, 2, 1, K)
    retained = kept == "retained"
    given = [q, *(x.requires_grad_(retained).expand(-1, -1, -1, 3, -1) for x in (k, v))]
    dense = [x.detach().clone().requires_grad_() for x in given]
    one = given[place]
    if retained:
        one.retain_grad()
    else:
        if kept != "view of a view":
            one = one.detach()
        one.requires_grad_()
        given[place] = one if kept == "leaf" else one[:]
    memory_efficient_attention(*given).sin().sum().backward()
    memory_efficient_attention(*dense).sin().sum().backward()
    torch.testing.assert_close(one.grad, dense[place].grad)


def test_gradients_of_expanded_heads_in_a_graph() -> None:
    q, k = made(B, M, 2, 3, K), made(B, N, 2, 1, K).expand(-1, -1, -1, 3, -1).requires_grad_()
    dense = k.detach().clone().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(memory_efficient_attention, fullgraph=True, backend="aot_eager")
    compiled(q, k, k).sin().sum().backward()
    memory_efficient_attention(q, dense, dense).sin().sum().backward()
    torch.testing.assert_close(k.grad, dense.grad)


def test_expanded_heads_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append(tuple(x.shape[2] for x in (q, k, v)))
        return q + k.sum() + v.sum()

    monkeypatch.setattr(xformers_attention, "attention", attention)
    q, k = made(B, M, 2, 3, K), made(B, N, 2, 1, K).requires_grad_()
    keys = k.transpose(1, 2).transpose(1, 2).expand(-1, -1, -1, 3, -1)[:, 1:]
    memory_efficient_attention(q, keys, keys)
    memory_efficient_attention(q, keys.detach(), keys.detach())
    assert seen == [(6, 2, 2)] * 2


@pytest.mark.parametrize("expanded", [True, False], ids=["expanded", "dense"])
def test_groups_of_heads(expanded: bool) -> None:
    q, (k, v) = made(B, M, 2, 3, K), made(2, B, N, 2, 1, K).expand(-1, -1, -1, -1, 3, -1)
    if not expanded:
        k, v = k.contiguous(), v.contiguous()
    bias = made(B, 2, 3, M, N)
    out = memory_efficient_attention(q, k, v, bias)
    flat = oracle(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3), bias.flatten(1, 2))
    torch.testing.assert_close(out, flat.view(q.shape))


@pytest.mark.parametrize("shape", [(B, 2, 1), (1, 1, 3), (1, 1, 1)], ids=str)
def test_a_bias_for_some_of_groups_and_heads(shape: tuple[int, ...]) -> None:
    q, k, v = made(B, M, 2, 3, K), made(B, N, 2, 3, K), made(B, N, 2, 3, K)
    bias = made(*shape, M, N).requires_grad_()
    found = memory_efficient_attention(q, k, v, bias)
    every = bias.expand(B, 2, 3, M, N).flatten(1, 2)
    flat = oracle(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3), every)
    torch.testing.assert_close(found, flat.view(q.shape))
    grads = [torch.autograd.grad(x.square().sum(), bias)[0] for x in (found, flat)]
    torch.testing.assert_close(*grads)


def test_a_bias_of_other_groups_is_refused() -> None:
    """As many heads in all, in another order."""
    q, k = made(B, M, 2, 3, K), made(B, N, 2, 3, K)
    with pytest.raises(ShapeError, match=r"2 \(or 1\) groups of 3 \(or 1\) heads, found \(2, 3, 2"):
        memory_efficient_attention(q, k, k, made(B, 3, 2, M, N))


def lengths(*sizes: int) -> Any:
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    return SimpleNamespace(seqstart=starts, seqstart_py=starts.tolist(), max_seqlen=max(sizes))


@pytest.mark.parametrize(
    ("kind", "inner"),
    [
        ("BlockDiagonalMask", None),
        ("BlockDiagonalCausalMask", "LowerTriangularMask"),
        ("BlockDiagonalCausalFromBottomRightMask", "LowerTriangularFromBottomRightMask"),
    ],
)
def test_sequences_end_to_end(kind: str, inner: str | None) -> None:
    sizes_q, sizes_k = (3, 1, 5), (4, 6, 5)
    info_q, info_k = lengths(*sizes_q), lengths(*sizes_k)
    if kind == "BlockDiagonalCausalMask":  # two objects, as of a mask that went to a device
        sizes_k, info_k = sizes_q, lengths(*sizes_q)
    q, k, v = made(1, sum(sizes_q), H, K), made(1, sum(sizes_k), H, K), made(1, sum(sizes_k), H, K)
    out = memory_efficient_attention(q, k, v, mask(kind, q_seqinfo=info_q, k_seqinfo=info_k))
    pieces = zip(q.split(sizes_q, 1), k.split(sizes_k, 1), v.split(sizes_k, 1), strict=True)
    bias = None if inner is None else mask(inner)
    expected = [memory_efficient_attention(*piece, bias) for piece in pieces]
    torch.testing.assert_close(out, torch.cat(expected, 1))


PADDED = {
    "BlockDiagonalPaddedKeysMask": (None, {}),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ("LowerTriangularFromBottomRightMask", {}),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        "LocalAttentionFromBottomRightMask",
        {"window_left": 2, "window_right": 1},
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        "LowerTriangularFromBottomRightLocalAttentionMask",
        {"_window_size": 3},
    ),
}


def padded(room: int, *sizes: int) -> Any:
    return SimpleNamespace(
        **vars(lengths(*[room] * len(sizes))) | {"max_seqlen": max(sizes)},
        seqlen=torch.tensor(sizes, dtype=torch.int32),
        padding=room,
    )


@pytest.mark.parametrize("kind", PADDED)
def test_room_behind_the_keys_of_each_sequence(kind: str) -> None:
    inner, facts = PADDED[kind]
    sizes_q, sizes_k, room = (3, 1, 4), (4, 6, 5), 8
    q = made(1, sum(sizes_q), H, K).requires_grad_()
    k, v = (made(1, 3 * room, H, K).requires_grad_() for _ in "kv")
    info = {"q_seqinfo": lengths(*sizes_q), "k_seqinfo": padded(room, *sizes_k)}
    out = memory_efficient_attention(q, k, v, mask(kind, **info, **facts))
    bias = None if inner is None else mask(inner, **facts)
    used = [zip(x.split(room, 1), sizes_k, strict=True) for x in (k, v)]
    pieces = zip(q.split(sizes_q, 1), *([x[:, :n] for x, n in one] for one in used), strict=True)
    expected = torch.cat([memory_efficient_attention(*piece, bias) for piece in pieces], 1)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)]
    torch.testing.assert_close(*grads)


def test_a_window_in_sequences_end_to_end() -> None:
    sizes_q, sizes_k = (3, 1, 5), (4, 6, 5)
    info = {"q_seqinfo": lengths(*sizes_q), "k_seqinfo": lengths(*sizes_k)}
    q, k, v = made(1, sum(sizes_q), H, K), made(1, sum(sizes_k), H, K), made(1, sum(sizes_k), H, K)
    kind = "BlockDiagonalCausalLocalAttentionFromBottomRightMask"
    out = memory_efficient_attention(q, k, v, mask(kind, **info, _window_size=2))
    bias = mask("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=2)
    pieces = zip(q.split(sizes_q, 1), k.split(sizes_k, 1), v.split(sizes_k, 1), strict=True)
    expected = [memory_efficient_attention(*piece, bias) for piece in pieces]
    torch.testing.assert_close(out, torch.cat(expected, 1))


def test_dropout_and_the_dtype_of_the_output() -> None:
    q = made(1, 64, 1, K)
    torch.manual_seed(0)
    first = memory_efficient_attention(q, q, q, p=0.5)
    torch.manual_seed(0)
    again = memory_efficient_attention(q, q, q, p=0.5, op=object(), output_dtype=torch.float32)
    assert again.dtype == torch.float32
    torch.testing.assert_close(again, first.float())
    assert not torch.equal(first, memory_efficient_attention(q, q, q, p=0.5))


def test_what_is_refused() -> None:
    q, k = made(B, M, H, K), made(B, N, H, K)
    with pytest.raises(InvalidInputError, match="found SomeOtherMask"):
        memory_efficient_attention(q, k, k, mask("SomeOtherMask"))
    with pytest.raises(ShapeError, match="attn_bias must have 4 dimensions"):
        memory_efficient_attention(q, k, k, made(M, N))
    with pytest.raises(ShapeError, match="bias must have shape"):
        memory_efficient_attention(q, k, k, made(B, H, N, M))
    with pytest.raises(LayoutError, match="contiguous in the keys"):
        memory_efficient_attention(q, k, k, made(B, H, N, M).mT)
    blocks = mask("BlockDiagonalMask", q_seqinfo=lengths(M), k_seqinfo=lengths(N))
    with pytest.raises(InvalidInputError, match="a batch of 1, found 2"):
        memory_efficient_attention(q, k, k, blocks)
    causal = mask("BlockDiagonalCausalMask", q_seqinfo=lengths(N), k_seqinfo=lengths(M))
    with pytest.raises(ShapeError, match="of all tokens, 9 queries and 9 keys"):
        memory_efficient_attention(k[:1], k[:1], k[:1], causal)


def test_values_that_do_not_fit_are_refused() -> None:
    q, k = made(B, M, H, K), made(B, N, H, K)
    for attn_bias in (None, mask("LowerTriangularMask")):
        with pytest.raises(ShapeError, match="have the same sequence length and heads"):
            memory_efficient_attention(q, k, k[:, : N - 1], attn_bias)
    grouped = made(B, M, 2, H, K), made(B, N, 2, 1, K).expand(-1, -1, -1, H - 1, -1)
    with pytest.raises(ShapeError, match="must have the same groups and heads"):
        memory_efficient_attention(grouped[0], grouped[1], grouped[1])
