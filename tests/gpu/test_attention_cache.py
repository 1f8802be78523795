"""Decoding: KV caches with queries in a dense tensor, and packed sequences of one query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from device_call import DEVICE, check, poisoned_memory, require, run
from features import packed, sinks, slopes
from oracle import Call, assert_right

from flashvar.flash_attn import flash_attn_with_kvcache
from flashvar.ops.attention.torch_library import attention_fwd

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CAPACITY = 4097
USED = (0, 1, 63, 4097, 65, 3000)


def cached(
    head_dim: int,
    dtype: torch.dtype,
    rows: int,
    heads: tuple[int, int],
    used: Sequence[int] = USED,
    **given: Any,
) -> Call:
    """Sequences of `rows` queries; NaN is where a cache has no keys."""
    batch = len(used)
    lengths = ((rows,) * batch, (CAPACITY,) * batch)
    return packed(head_dim, dtype, *lengths, heads=heads, dense_keys=True, used=used, **given)


def attend(call: Call, rows: int, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and log-sum-exp in the shapes of packed queries, of a call whose queries are dense."""
    require(call, backend)
    q = call.q.unflatten(0, (-1, rows))
    optional = (None, call.sinks, call.alibi_slopes, None, None, None, call.seqused_k)
    options = (call.causal, call.scale, *call.window, call.softcap, 0.0, False, "bshd", backend)
    with poisoned_memory(call, deterministic=True):
        out, lse = attention_fwd(q, call.k, call.v, *optional, *options, None, None)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"causal": True},
        {"window": (20, 0)},
        {"window": (-1, 3)},
        {"causal": True, "sinks": FP32},
        {"softcap": 5.0},
        {"alibi_slopes": None},
    ],
    ids=lambda given: "-".join(given) or "full",
)
@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (8, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_dense_queries(
    rows: int, heads: tuple[int, int], given: dict[str, Any], backend: str
) -> None:
    """A tile has queries of one head; with one query or a few it has the heads of a group."""
    chosen = dict(given)
    if "sinks" in chosen:
        chosen["sinks"] = sinks(heads[0], chosen["sinks"])
    if "alibi_slopes" in chosen:
        chosen["alibi_slopes"] = slopes(len(USED), heads[0]) * 0.02
    for head_dim, dtype in ((64, BF16), (128, FP16)):
        call = cached(head_dim, dtype, rows, heads, **chosen)
        assert_right(call, *attend(call, rows, backend))


@pytest.mark.parametrize("heads", [(8, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_windows_of_many_caches(rows: int, heads: tuple[int, int], backend: str) -> None:
    """So many that the heads of a group are packed although a window hides most keys."""
    for head_dim, dtype in ((64, BF16), (128, FP16)):
        call = cached(head_dim, dtype, rows, heads, used=9 * USED, window=(700, 0))
        assert_right(call, *attend(call, rows, backend))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_function(rows: int, causal: bool, backend: str) -> None:
    call = cached(128, BF16, rows, (8, 2), causal=causal)
    require(call, backend)
    assert call.seqused_k is not None
    out, lse = flash_attn_with_kvcache(
        call.q.unflatten(0, (-1, rows)),
        call.k,
        call.v,
        cache_seqlens=call.seqused_k,
        causal=causal,
        return_softmax_lse=True,
    )
    assert out.device.type == DEVICE
    assert_right(call, out.flatten(0, 1), lse.transpose(0, 1).flatten(1))


# Sequences of one packed query.

LENGTHS_Q = (1, 0, 1, 1, 1, 0)
LENGTHS_K = (8191, 17, 900, 0, 1, 3000)
ONE_QUERY: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window-right": {"window": (-1, 3)},
    "window": {"window": (20, 0)},
    "sinks": {"sinks": FP32},
    "softcap": {"softcap": 5.0},
    "outside": {"outside": (3, 70)},
    "outside-sinks": {"outside": (3, 70), "sinks": BF16},
}


def one_query(head_dim: int, dtype: torch.dtype, heads: tuple[int, int], **given: Any) -> Call:
    chosen = dict(given)
    if "sinks" in chosen:
        chosen["sinks"] = sinks(heads[0], chosen["sinks"])
    return packed(head_dim, dtype, LENGTHS_Q, LENGTHS_K, heads=heads, **chosen)


@pytest.mark.parametrize("feature", ONE_QUERY)
@pytest.mark.parametrize("heads", [(8, 2), (24, 1), (4, 4)], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, BF16), (128, FP16), (256, BF16)], ids=["d64", "d128", "d256"]
)
def test_one_packed_query(
    head_dim: int, dtype: torch.dtype, heads: tuple[int, int], feature: str, backend: str
) -> None:
    check(one_query(head_dim, dtype, heads, **ONE_QUERY[feature]), backend)


@pytest.mark.parametrize("heads", [(8, 2), (130, 1)], ids=str)
@pytest.mark.parametrize("sequences", [1, 40, 300])
def test_one_packed_query_of_caches(sequences: int, heads: tuple[int, int], backend: str) -> None:
    """Fewer tiles than SMs, and more, so that keys are not divided; more heads than a tile has."""
    used = [(37 * i) % 258 for i in range(sequences)]
    call = packed(
        *(128, BF16, (1,) * sequences, (257,) * sequences),
        heads=heads,
        dense_keys=True,
        used=used,
        causal=True,
    )
    check(call, backend)


def test_rows_of_no_sequence(backend: str) -> None:
    """Zeros and -inf, before the first sequence and after the last, and beside empty ones."""
    call = one_query(128, BF16, (8, 2), outside=(3, 70))
    require(call, backend)
    with poisoned_memory(call, deterministic=True):
        out, lse = run(call, backend)
    for rows in (slice(0, 3), slice(7, None)):
        assert (out[rows] == 0).all()
        assert (lse[:, rows] == -torch.inf).all()
    assert lse[:, 3:5].isfinite().all()
    assert lse[:, 6].isfinite().all()
    assert (lse[:, 5] == -torch.inf).all()  # no keys
    assert (out[5] == 0).all()


def test_a_larger_bound(backend: str) -> None:
    """The bound of the lengths chooses another kernel for the same result."""
    call = one_query(128, BF16, (8, 2), causal=True)
    require(call, backend)
    out, lse = run(call, backend)
    other, other_lse = run(call, backend, max_seqlen=8191)
    torch.testing.assert_close(out, other, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(lse, other_lse, rtol=0, atol=2e-5)
