"""Packed sequences in the reference: each is attention of its own, wherever its rows lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Call, assert_gradients_right, assert_right

import flashvar

RNG = torch.tensor([3, 1])
OFFSETS = {
    "one": ([0, 9], [0, 12]),
    "several": ([0, 3, 9], [0, 7, 12]),
    "empty-first": ([0, 0, 9], [0, 4, 12]),
    "empty-last": ([0, 9, 9], [0, 4, 12]),
    "empty-middle": ([0, 4, 4, 9], [0, 4, 8, 12]),
    "no-keys-for-one": ([0, 4, 9], [0, 0, 12]),
    "rows-of-no-sequence": ([2, 4, 8], [1, 6, 11]),
    "nothing": ([0, 0, 0], [0, 0, 0]),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 1.0},
    "sinks": {"sinks": torch.randn(4), "causal": True},
    "alibi": {"alibi_slopes": torch.rand(4), "causal": True},
    "dropout": {"dropout_p": 0.4, "rng_state": RNG},
}


def offsets(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    q = torch.randn(9, 4, 16, dtype=dtype)
    k, v = torch.randn(12, 2, 16, dtype=dtype), torch.randn(12, 2, 24, dtype=dtype)
    return [q, k, v]


def check(call: Call) -> None:
    leaves = {name: getattr(call, name) for name in ("q", "k", "v", "sinks")}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items() if x is not None}
    assert call.cu_seqlens_q is not None
    out, lse = flashvar.attention_varlen(
        **leaves,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        seqused_k=call.seqused_k,
        causal=call.causal,
        window_size=call.window,
        softcap=call.softcap,
        alibi_slopes=call.alibi_slopes,
        dropout_p=call.dropout_p,
        rng_state=call.rng_state,
        return_lse=True,
    )
    assert_right(call, out.detach(), lse.detach())
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (grad_out, grad_lse))
    assert_gradients_right(call, dict(zip(leaves, found, strict=True)), grad_out, grad_lse)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("packing", OFFSETS)
def test_packed(packing: str, feature: str) -> None:
    queries, keys = OFFSETS[packing]
    call = Call(
        *make(), cu_seqlens_q=offsets(queries), cu_seqlens_k=offsets(keys), **FEATURES[feature]
    )
    check(call)


@pytest.mark.parametrize("packing", ["several", "empty-middle"])
def test_packed_keys_up_to_a_length(packing: str) -> None:
    queries, keys = OFFSETS[packing]
    used = offsets([2, 0, 3][: len(keys) - 1])
    check(
        Call(
            *make(),
            causal=True,
            cu_seqlens_q=offsets(queries),
            cu_seqlens_k=offsets(keys),
            seqused_k=used,
        )
    )


@pytest.mark.parametrize("used", [[12, 12], [5, 0], [1, 12]], ids=str)
def test_dense_cache_up_to_a_length(used: list[int]) -> None:
    q = torch.randn(9, 4, 16)
    k, v = torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16)
    call = Call(q, k, v, causal=True, cu_seqlens_q=offsets([0, 4, 9]), seqused_k=offsets(used))
    check(call)


def test_equal_lengths_are_a_batch() -> None:
    q, k, v = torch.randn(2, 6, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
    state: dict[str, Any] = {"dropout_p": 0.3, "rng_state": RNG, "causal": True}
    found = flashvar.attention_varlen(
        *(x.flatten(0, 1) for x in (q, k, v)),
        cu_seqlens_q=offsets([0, 6, 12]),
        cu_seqlens_k=offsets([0, 8, 16]),
        **state,
    )
    torch.testing.assert_close(found.unflatten(0, (2, 6)), flashvar.attention(q, k, v, **state))


def test_keys_are_packed_like_queries_by_default() -> None:
    q = torch.randn(9, 2, 8)
    packing = offsets([0, 4, 9])
    torch.testing.assert_close(
        flashvar.attention_varlen(q, q, q, cu_seqlens_q=packing),
        flashvar.attention_varlen(q, q, q, cu_seqlens_q=packing, cu_seqlens_k=packing),
    )


def test_bounds_larger_than_the_truth_change_nothing() -> None:
    q = torch.randn(9, 2, 8)
    packing = offsets([0, 4, 9])
    torch.testing.assert_close(
        flashvar.attention_varlen(
            q, q, q, cu_seqlens_q=packing, max_seqlen_q=700, max_seqlen_k=900, window_size=(2, 2)
        ),
        flashvar.attention_varlen(q, q, q, cu_seqlens_q=packing, window_size=(2, 2)),
    )


def test_gradients_by_differences() -> None:
    leaves = [x.requires_grad_() for x in make(torch.float64)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: flashvar.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=offsets([0, 2, 2, 8]),
            cu_seqlens_k=offsets([1, 5, 6, 12]),
            window_size=(3, 1),
            softcap=2.0,
            dropout_p=0.25,
            rng_state=RNG,
        ),
        leaves,
        fast_mode=True,
    )
