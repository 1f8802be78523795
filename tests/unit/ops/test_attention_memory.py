"""What a training step keeps, in bytes: no more than with scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from saved_bytes import kept
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import flashvar
from flashvar.integrations import torch as sdpa

BATCH, ROWS, HEADS, HEADS_KV, DIM = 2, 64, 4, 2, 16


def projected(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values [batch, heads, rows, dim] as models make them: views of rows."""
    widths = (HEADS * DIM, HEADS_KV * DIM, HEADS_KV * DIM)
    parts = (x @ weight).split(widths, -1)
    q, k, v = (part.contiguous().unflatten(-1, (-1, DIM)).transpose(1, 2) for part in parts)
    return q, k, v


def test_a_layer_keeps_its_tensors_once() -> None:
    x = torch.randn(BATCH, ROWS, 32)
    weight = torch.randn(32, (HEADS + 2 * HEADS_KV) * DIM, requires_grad=True)

    def layer() -> torch.Tensor:
        out = flashvar.attention(*projected(x, weight), causal=True, layout="bhsd->bshd")
        return out.flatten(2).sum()

    rows = BATCH * ROWS
    expected = rows * (2 * HEADS + 2 * HEADS_KV) * DIM + rows * HEADS  # q, out, k, v and lse
    assert kept(layer, x, weight) == 4 * expected


class Copies(TorchDispatchMode):
    """Counts what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy):
            self.found.append(f"{func} of {tuple(args[0].shape)}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("heads_first", [True, False], ids=["views", "contiguous"])
def test_gradients_lie_in_memory_as_their_tensors(heads_first: bool) -> None:
    tensors = [torch.randn(BATCH, HEADS, ROWS, DIM) for _ in "qkv"]
    if not heads_first:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    leaves = [x.requires_grad_() for x in tensors]
    grads = torch.autograd.grad(flashvar.attention(*leaves, layout="bhsd").sum(), leaves)
    assert [x.stride() for x in grads] == [x.stride() for x in leaves]


def test_gradients_go_back_through_views_without_copies() -> None:
    def copies(attend: Callable[..., torch.Tensor]) -> list[str]:
        rows = [torch.randn(BATCH, ROWS, heads * DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]
        leaves = [x.requires_grad_() for x in rows]
        q, k, v = (x.unflatten(-1, (-1, DIM)).transpose(1, 2) for x in leaves)
        out = attend(q, k, v)
        with Copies() as seen:
            torch.autograd.grad(out, leaves, torch.randn_like(out))
        return seen.found

    assert copies(lambda *x: flashvar.attention(*x, layout="bhsd->bshd").flatten(2)) == []
    with sdpa.activate("reference"):

        def by_sdpa(*x: torch.Tensor) -> torch.Tensor:
            out = functional.scaled_dot_product_attention(*x, enable_gqa=True)
            return out.transpose(1, 2).flatten(2)

        assert copies(by_sdpa) == []
