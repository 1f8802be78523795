"""Documents by ids and lengths, against a mask."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashvar.errors import DtypeError, InvalidInputError, ShapeError
from flashvar.integrations.documents import Documents

IDS = torch.tensor([[5, 5, 5, 2, 2, 9, 9], [2, 2, 2, 2, 2, 7, 5], [5, 5, 5, 5, 5, 5, 5]])
STARTS = [0, 3, 5, 7, 12, 13, 14, 21]


@pytest.mark.parametrize("causal", [False, True])
def test_equals_a_mask(causal: bool) -> None:
    q = torch.randn(3, 7, 4, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(3, 7, 2, 16, dtype=torch.float64, requires_grad=True) for _ in "kv")
    mask = (IDS[:, :, None] == IDS[:, None, :])[:, None]
    if causal:
        mask = mask & torch.ones(7, 7, dtype=torch.bool).tril()
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(*heads_first, mask, enable_gqa=True).transpose(1, 2)
    found = Documents.of_ids(IDS).attention(q, k, v, causal=causal)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected)]
    torch.testing.assert_close(*grads)


def test_ids_and_lengths_say_the_same() -> None:
    lengths = [b - a for a, b in pairwise(STARTS)]
    for documents in (Documents.of_ids(IDS), Documents.of_lengths(lengths)):
        assert documents.cu_seqlens.tolist() == STARTS
        assert documents.cu_seqlens.dtype == torch.int32
        assert documents[1:] == (7, 21)
    assert Documents.of_ids(IDS[1].to(torch.uint8)).cu_seqlens.tolist() == [0, 5, 6, 7]
    assert Documents.of_lengths([0, 3, 0]).cu_seqlens.tolist() == [0, 0, 3, 3]


def test_lengths_inside_of_transforms() -> None:
    """Also of a tensor, and of one that is made inside."""
    q, lengths = torch.randn(7, 2, 8), torch.tensor([3, 4])

    def loss(q: torch.Tensor, add: int | None = None) -> torch.Tensor:
        documents = Documents.of_lengths(lengths if add is None else lengths + add)
        return documents.attention(q, q, q).square().sum()

    leaf = q.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf), leaf)[0]
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)
    torch.testing.assert_close(torch.func.grad(loss)(q, 0), expected)


def test_packed_rows() -> None:
    q, v = torch.randn(21, 2, 8), torch.randn(21, 2, 12)
    documents = Documents.of_ids(IDS)
    out = documents.attention(q, q, v, window_size=(1, 0))
    dense = (x.view(3, 7, *x.shape[1:]) for x in (q, q, v))
    assert out.shape == v.shape
    assert torch.equal(documents.attention(*dense, window_size=(1, 0)).flatten(0, 1), out)


def test_one_graph() -> None:
    documents, q = Documents.of_ids(IDS), torch.randn(3, 7, 2, 8)

    def layer(q: torch.Tensor, documents: Documents) -> torch.Tensor:
        return documents.attention(q, q, q, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, documents), layer(q, documents))


def test_ids_inside_of_one_graph() -> None:
    """Where torch.compile was told to trace sizes that depend on values."""

    def layer(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return Documents.of_ids(ids).attention(q, q, q, causal=True)

    torch._dynamo.reset()
    q = torch.randn(3, 7, 2, 8)
    sizes = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(sizes):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for ids in (IDS, IDS.flip(0), torch.zeros_like(IDS)):
            torch.testing.assert_close(compiled(q, ids), layer(q, ids))


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (torch.zeros(2, 3), DtypeError, "must be integers, found torch.float32"),
        (torch.zeros(2, 3, dtype=torch.bool), DtypeError, "must be integers"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), ShapeError, r"found \(1, 2, 3\)"),
        (torch.zeros(0, dtype=torch.int64), ShapeError, "with tokens"),
        ([1, 2], InvalidInputError, "found list"),
    ],
    ids=["float", "bool", "rank", "empty", "list"],
)
def test_ids_that_are_refused(ids: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Documents.of_ids(ids)


def test_other_tokens_are_refused() -> None:
    q = torch.randn(2, 7, 2, 8)
    with pytest.raises(
        ShapeError, match=r"hold the 21 tokens of the documents, found \(2, 7, 2, 8\)"
    ):
        Documents.of_ids(IDS).attention(q, q, q)
    # Of other keys the offsets of the documents would be those of other tokens.
    right, longer = torch.randn(3, 7, 2, 8), torch.randn(3, 8, 2, 8)
    with pytest.raises(ShapeError, match=r"k must hold the 21 tokens .*, found \(3, 8, 2, 8\)"):
        Documents.of_ids(IDS).attention(right, longer, longer)
    for lengths in ([], [3, -1]):
        with pytest.raises(InvalidInputError, match="lengths must be numbers of tokens"):
            Documents.of_lengths(lengths)


def test_a_log_sum_exp_is_refused() -> None:
    q = torch.randn(3, 7, 2, 8)
    documents = Documents.of_ids(IDS)
    with pytest.raises(InvalidInputError, match=r"return_lse must be left out, .*attention_varlen"):
        documents.attention(q, q, q, return_lse=True)
    torch.testing.assert_close(
        documents.attention(q, q, q, return_lse=False), documents.attention(q, q, q)
    )
