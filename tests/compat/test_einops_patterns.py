"""`rearrange` and `repeat` that `flash_attn.bert_padding` hands on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashvar.compat.einops_patterns import rearrange, repeat
from flashvar.errors import InvalidInputError

X = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)


@pytest.mark.parametrize(
    ("pattern", "lengths", "expected"),
    [
        ("b s ... -> (b s) ...", {}, X.flatten(0, 1)),
        ("b s h d -> b h s d", {}, X.transpose(1, 2)),
        ("b s (t h) d -> t b s (h d)", {"t": 2}, X.unflatten(2, (2, 2)).movedim(2, 0).flatten(-2)),
        ("... d -> d ...", {}, X.movedim(-1, 0)),
        ("b ... -> (...) b", {}, X.flatten(1).T),
        ("... h d->... (h d)", {}, X.flatten(-2)),
        ("b s h d -> b 1 s h () d", {}, X[:, None, :, :, None]),
        ("b s h (d two) -> two b s h d", {"d": 3}, X.unflatten(-1, (3, 2)).movedim(-1, 0)),
    ],
)
def test_rearrange(pattern: str, lengths: dict[str, int], expected: torch.Tensor) -> None:
    assert torch.equal(rearrange(X, pattern, **lengths), expected)


@pytest.mark.parametrize(
    ("pattern", "lengths", "expected"),
    [
        ("... d -> ... 1 (2 d)", {}, torch.cat((X, X), -1)[..., None, :]),
        ("b s h d -> b s h (d 2)", {}, X.repeat_interleave(2, -1)),
        ("b ... -> n b ...", {"n": 3}, torch.stack((X, X, X))),
        ("b s h d -> b s (h g) d", {"g": 2}, X.repeat_interleave(2, 2)),
    ],
)
def test_repeat(pattern: str, lengths: dict[str, int], expected: torch.Tensor) -> None:
    assert torch.equal(repeat(X, pattern, **lengths), expected)


def test_several_tensors_and_one_without_rows() -> None:
    assert torch.equal(rearrange([X, X], "t b ... -> b t ..."), torch.stack((X, X), 1))
    assert rearrange(X[:0], "b s h d -> (b s) h d").shape == (0, 4, 6)


def test_gradients_pass() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(repeat(x, "a b -> b (a 4)").sum(), x)
    assert torch.equal(grad, torch.full((2, 3), 4.0))


@pytest.mark.parametrize(
    ("function", "pattern", "lengths", "said"),
    [
        (rearrange, "b s h d", {}, "found 0 arrows"),
        (rearrange, "b s h d -> b s h", {}, "d on only one side"),
        (rearrange, "b s -> s b", {}, "name every dimension of the tensor, found 2"),
        (rearrange, "a b s h d -> a b s h d", {}, "name every dimension of the tensor, found 5"),
        (rearrange, "b s h d -> b b s h d", {}, "an axis twice"),
        (rearrange, "(a b) s h d -> a b s h d", {}, "no lengths of a, b"),
        (rearrange, "(a b) s h d -> a b s h d", {"a": 4}, "must be a dimension of 2"),
        (rearrange, "1 s h d -> s h d", {}, "must be a dimension of 2"),
        (rearrange, "b (s h d -> b s h d", {}, "not closed"),
        (rearrange, "b s h d -> b (s (h) d)", {}, "found '\\('"),
        (rearrange, "b s h d -> b ? h d", {}, "found '\\?'"),
        (rearrange, "b s h d -> b s h d", {"z": 1}, "a length of z"),
        (rearrange, "b s ... -> b s", {}, r"\.\.\. on only one side"),
        (rearrange, "b s h d -> b s h d ...", {}, r"\.\.\. on only one side"),
        (rearrange, "(... b) s h d -> ... b s h d", {}, "on the left"),
        (repeat, "b s h d -> b s h d k", {}, "k without a length"),
        (repeat, "b s h d -> b", {}, "d, h, s only on the left"),
    ],
)
def test_what_is_no_pattern_is_said(
    function: Any, pattern: str, lengths: dict[str, int], said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        function(X, pattern, **lengths)


@pytest.mark.parametrize("given", [None, 3, [], [None]], ids=str)
def test_what_is_no_tensor_is_said(given: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"must be a torch.Tensor.*as_tensor"):
        rearrange(given, "a -> a")


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic: bool | None) -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rearrange(x, "b s (t h) d -> t (b s) h d", t=2), repeat(x, "b ... -> n b ...", n=3)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for x in (X, torch.randn(3, 3, 4, 6)):
        torch.testing.assert_close(compiled(x), call(x), rtol=0, atol=0)
