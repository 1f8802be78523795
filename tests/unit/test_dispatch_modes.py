"""Which tensors may skip torch's dispatcher."""

from __future__ import annotations

import pytest
import torch

import flashvar
from flashvar.ops.causal_conv1d import api as convolution
from flashvar.ops.dispatch_modes import are_plain


class Own(torch.Tensor):
    """A subclass that may want to see calls."""


@pytest.mark.parametrize(
    ("x", "plain"),
    [
        (torch.ones(2), True),
        (torch.nn.Parameter(torch.ones(2)), True),
        (torch.ones(2).as_subclass(Own), False),
        (torch._neg_view(torch.ones(2)), False),
        (torch.ones(2, dtype=torch.complex64).conj().imag, False),
        (torch._efficientzerotensor(2), False),
        (None, False),
    ],
    ids=["tensor", "parameter", "subclass", "negated", "imaginary", "zero", "none"],
)
def test_plain(x: torch.Tensor | None, plain: bool) -> None:
    assert are_plain(x) is plain
    assert are_plain(torch.ones(2), x) is plain
    assert convolution._are_plain(torch.ones(2), torch.ones(2), torch.ones(2), None)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_attention_of_a_negated_view(place: int) -> None:
    given = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    lazy = [torch._neg_view(x) if i == place else x for i, x in enumerate(given)]
    real = [x.neg() if i == place else x for i, x in enumerate(given)]
    assert torch.equal(flashvar.attention(*lazy), flashvar.attention(*real))
