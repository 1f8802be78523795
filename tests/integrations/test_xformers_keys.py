"""xformers' masks of keys in pages, anywhere, and from the top left; partial attentions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashvar.errors import ShapeError
from flashvar.integrations.xformers import (
    memory_efficient_attention,
    memory_efficient_attention_partial,
    merge_attentions,
)

H, K = 4, 16
QUERIES = (3, 1, 4)
KEYS = (4, 6, 5)
PAGE = 4

DIAGONALS = {
    "everything": {},
    "causal": {},
    "window": {"window_left": 2, "window_right": 1},
    "causal window": {"_window_size": 3},
}
ANYWHERE = {
    "BlockDiagonalGappyKeysMask": "everything",
    "BlockDiagonalCausalWithOffsetGappyKeysMask": "causal",
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": "window",
}
PAGED = {
    "PagedBlockDiagonalPaddedKeysMask": "everything",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": "causal",
    "PagedBlockDiagonalCausalLocalPaddedKeysMask": "causal window",
    "PagedBlockDiagonalGappyKeysMask": "everything",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": "causal",
}


def mask(kind: str, **facts: Any) -> Any:
    return type(kind, (SimpleNamespace,), {})(**facts)


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def lengths(*sizes: int) -> Any:
    starts = ints(0, *sizes).cumsum(0, dtype=torch.int32)
    return SimpleNamespace(seqstart=starts, seqstart_py=starts.tolist(), max_seqlen=max(sizes))


def alone(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: str, corner: str = "bottom right"
) -> torch.Tensor:
    """Attention of one sequence, written out, of [tokens, heads, head_dim]."""
    offset = len(k) - len(q) if corner == "bottom right" else 0
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - offset
    left, right = {
        "everything": (len(k) + len(q), len(k) + len(q)),
        "causal": (len(k) + len(q), 0),
        "window": (2, 1),
        "causal window": (2, 0),
    }[seen]
    visible = (distance >= -left) & (distance <= right)
    scores = torch.einsum("mhk,nhk->hmn", q, k) * K**-0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hmn,nhk->mhk", weights, v)


def check(
    found: torch.Tensor, wanted: list[torch.Tensor], leaves: tuple[torch.Tensor, ...]
) -> None:
    expected = torch.cat(wanted)[None]
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x.square().sum(), leaves) for x in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ANYWHERE)
def test_keys_anywhere(kind: str) -> None:
    """Out of order, with a gap in front, and with two sequences of the same keys."""
    begins = (9, 2, 4)
    q, k, v = made(1, sum(QUERIES), H, K), made(1, 15, H, K), made(1, 15, H, K)
    keys = SimpleNamespace(seqstart=ints(*begins, 15), seqlen=ints(*KEYS), max_seqlen=max(KEYS))
    facts = {"q_seqinfo": lengths(*QUERIES), "k_seqinfo": keys, **DIAGONALS[ANYWHERE[kind]]}
    found = memory_efficient_attention(q, k, v, mask(kind, **facts))
    parts = zip(q[0].split(QUERIES), begins, KEYS, strict=True)
    wanted = [alone(x, k[0, b : b + n], v[0, b : b + n], ANYWHERE[kind]) for x, b, n in parts]
    check(found, wanted, (q, k, v))


@pytest.mark.parametrize("kind", PAGED)
def test_keys_in_pages(kind: str) -> None:
    """What is in no page that is used may be anything, also the numbers of such pages."""
    tables = ints(5, -1, 9, 0, 6, 99, 2, 3, -7).view(3, 3)
    begins = (0, 1, 2) if "Gappy" in kind else (0, 0, 0)
    used = [torch.cat([torch.arange(PAGE) + PAGE * page for page in row]) for row in tables]
    used = [rows[b : b + n] for rows, b, n in zip(used, begins, KEYS, strict=True)]
    q = made(1, sum(QUERIES), H, K)
    k, v = (torch.full((1, 7 * PAGE, H, K), torch.nan, dtype=torch.float64) for _ in "kv")
    for one in (k, v):
        one[0, torch.cat(used)] = torch.randn(sum(KEYS), H, K, dtype=torch.float64)
        one.requires_grad_()
    ends = ints(*(b + n for b, n in zip(begins, KEYS, strict=True)))
    keys = SimpleNamespace(seqstart=ints(*begins, -1), seqlen=ends, max_seqlen=max(KEYS))
    if "Gappy" not in kind:
        keys.padding = 3 * PAGE
    facts = {"block_tables": tables, "page_size": PAGE, **DIAGONALS[PAGED[kind]]}
    info = {"q_seqinfo": lengths(*QUERIES), "k_seqinfo": keys}
    found = memory_efficient_attention(q, k, v, mask(kind, **info, **facts))
    parts = zip(q[0].split(QUERIES), used, strict=True)
    check(found, [alone(x, k[0, rows], v[0, rows], PAGED[kind]) for x, rows in parts], (q, k, v))


def test_a_sequence_without_pages_is_padding() -> None:
    q, k, v = made(1, sum(QUERIES), H, K), made(1, 7 * PAGE, H, K), made(1, 7 * PAGE, H, K)
    kind = next(kind for kind in PAGED if "Gappy" not in kind)

    def attend(*table: int) -> Any:
        keys = SimpleNamespace(seqstart=ints(0, 0, 0, -1), seqlen=ints(*KEYS), max_seqlen=max(KEYS))
        keys.padding = 3 * PAGE
        facts = {"block_tables": ints(*table).view(3, 3), "page_size": PAGE}
        info = {"q_seqinfo": lengths(*QUERIES), "k_seqinfo": keys}
        return memory_efficient_attention(
            q, k, v, mask(kind, **info, **facts, **DIAGONALS[PAGED[kind]])
        )

    found = attend(5, 1, 0, -1, -1, -1, 2, 3, 4)[0].split(QUERIES)
    wanted = attend(5, 1, 0, 1, 1, 1, 2, 3, 4)[0].split(QUERIES)
    torch.testing.assert_close(found[::2], wanted[::2])
    assert not found[1].any()


@pytest.mark.parametrize("sizes", [(3, 1, 5), (9, 6, 5), (3, 9, 1)], ids=["fewer", "more", "mixed"])
@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("BlockDiagonalCausalMask", "causal"),
        ("BlockDiagonalCausalLocalAttentionMask", "causal window"),
    ],
)
def test_diagonals_from_the_top_left(kind: str, seen: str, sizes: tuple[int, ...]) -> None:
    """With fewer and with more queries than keys."""
    q, k, v = made(1, sum(sizes), H, K), made(1, sum(KEYS), H, K), made(1, sum(KEYS), H, K)
    info = {"q_seqinfo": lengths(*sizes), "k_seqinfo": lengths(*KEYS)}
    one = mask(kind, **info, **DIAGONALS[seen])
    found, lse = memory_efficient_attention_partial(q, k, v, one)
    pieces = zip(q[0].split(sizes), k[0].split(KEYS), v[0].split(KEYS), strict=True)
    check(found, [alone(*piece, seen, "top left") for piece in pieces], (q, k, v))
    assert lse.shape == (1, H, sum(sizes))
    assert torch.equal(memory_efficient_attention(q, k, v, one), found)


@pytest.mark.parametrize("keys", [3, 6, 9])
@pytest.mark.parametrize("heads", [(), (H,), (2, 2)], ids=["none", "heads", "groups"])
def test_a_bias_beside_a_diagonal(keys: int, heads: tuple[int, ...]) -> None:
    queries = 6
    q, k, v = made(2, queries, *heads, K), made(2, keys, *heads, K), made(2, keys, *heads, K)
    bias = made(2, *heads, queries, keys)
    hidden = torch.ones(queries, keys).triu(1).bool()
    added = bias.masked_fill(hidden, -torch.inf)
    found = memory_efficient_attention(
        q, k, v, mask("LowerTriangularMaskWithTensorBias", _bias=bias)
    )
    expected = memory_efficient_attention(q, k, v, added)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v, bias)) for x in (found, expected)]
    torch.testing.assert_close(*grads)


MASKS = {
    "none": None,
    "top left": mask("LowerTriangularMask"),
    "window": mask("LocalAttentionFromBottomRightMask", window_left=2, window_right=1),
    "bias": torch.randn(2, H, 6, 9, dtype=torch.float64),
}


@pytest.mark.parametrize("one", MASKS.values(), ids=MASKS)
def test_log_sum_exp(one: Any) -> None:
    q, k, v = made(2, 6, H, K), made(2, 9, H, K), made(2, 9, H, K)
    out, lse = memory_efficient_attention_partial(q, k, v, one, scale=0.3, output_dtype=torch.float)
    assert out.dtype == torch.float32
    assert torch.equal(out, memory_efficient_attention(q, k, v, one, scale=0.3).float())
    # Weights of 1: the scores' exponentials alone.
    scores = torch.einsum("bmhk,bnhk->bhmn", q, k) * 0.3
    if isinstance(one, torch.Tensor):
        scores = scores + one
    distance = torch.arange(9) - torch.arange(6)[:, None]
    if one is MASKS["top left"]:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    if one is MASKS["window"]:
        scores = scores.masked_fill((distance < 1) | (distance > 4), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("form", ["list", "stacked", "mixed"])
@pytest.mark.parametrize("heads", [(H,), (2, 2)], ids=["heads", "groups"])
def test_parts_are_merged(heads: tuple[int, ...], form: str) -> None:
    q, k, v = made(2, 6, *heads, K), made(2, 9, *heads, K), made(2, 9, *heads, K)
    whole, wanted = memory_efficient_attention_partial(q, k, v)
    parts = [
        memory_efficient_attention_partial(q, *pair)
        for pair in zip(k.split((2, 4, 3), 1), v.split((2, 4, 3), 1), strict=True)
    ]
    outs, lses = map(list, zip(*parts, strict=True))
    assert lses[0].shape == (2, *heads, 6)
    given: Any = (outs, lses)
    if form != "list":
        given = (torch.stack(outs), torch.stack(lses) if form == "stacked" else lses)
    out, lse = merge_attentions(*given)
    assert lse is not None
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, wanted)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, whole)]
    torch.testing.assert_close(*grads)
    low, none = merge_attentions(*given, write_lse=False, output_dtype=torch.float16)
    assert none is None
    assert torch.equal(low, out.half())


def test_parts_of_other_ranks() -> None:
    with pytest.raises(ShapeError, match="parts of 4 or 5 dimensions, found a part of 3"):
        merge_attentions([made(2, 6, K)], [made(2, 6)])
