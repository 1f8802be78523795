"""Tensors that are alike in a call of scaled_dot_product_attention: one look serves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sdpa_calls import B, D, H, L, computed, made
from torch.nn import functional

from flashvar.integrations.torch import activation as ours


@pytest.mark.parametrize("wants_gradients", [False, True])
@pytest.mark.parametrize("seqlen_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -0.3, "is_causal": True}])
def test_tensors_that_are_alike_take_one_look(
    options: dict[str, Any],
    seqlen_first: bool,
    wants_gradients: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [made(B, L, H, D).transpose(1, 2) if seqlen_first else made(B, H, L, D)] * 3
    tensors = [tensor.detach().requires_grad_(wants_gradients) for tensor in tensors]
    call = computed if wants_gradients else output_alone
    with ours.activate(backend="reference"):
        monkeypatch.setattr(ours, "why_not", None)  # is not asked
        found = call(*tensors, **options)
        monkeypatch.undo()
        monkeypatch.setattr(ours, "attend_fast", lambda *_: None)
        expected = call(*tensors, **options)
        assert ours.report() == {ours.RUN: 2}
    for want, have in zip(expected, found, strict=True):
        assert torch.equal(have, want)
        assert have.stride() == want.stride()


def output_alone(*tensors: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return [functional.scaled_dot_product_attention(*tensors, **options)]


@pytest.mark.parametrize("odd", range(3))
def test_sparse_tensors_go_to_torch(odd: int) -> None:
    tensors = [torch.randn(B, H, L, D) for _ in range(3)]
    tensors[odd] = tensors[odd].to_sparse()
    with ours.activate(backend="reference"):
        with pytest.raises((RuntimeError, NotImplementedError)):
            functional.scaled_dot_product_attention(*tensors)
        assert "sparse" in str(ours.last_reason())
