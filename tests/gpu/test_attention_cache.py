"""KV caches with queries in a dense tensor, as flash_attn_with_kvcache computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, poisoned_memory, require
from features import packed, sinks, slopes
from oracle import Call, assert_right

from flashvar.flash_attn import flash_attn_with_kvcache
from flashvar.ops.attention.torch_library import attention_fwd

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CAPACITY = 4097
USED = (0, 1, 63, 4097, 65, 3000)


def cached(
    head_dim: int, dtype: torch.dtype, rows: int, heads: tuple[int, int], **given: Any
) -> Call:
    """Sequences of `rows` queries; NaN is where a cache has no keys."""
    batch = len(USED)
    lengths = ((rows,) * batch, (CAPACITY,) * batch)
    return packed(head_dim, dtype, *lengths, heads=heads, dense_keys=True, used=USED, **given)


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
@pytest.mark.parametrize("heads", [(8, 2), (8, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_dense_queries(
    rows: int, heads: tuple[int, int], given: dict[str, Any], backend: str
) -> None:
    """A tile has queries of one head; with one query it has the heads of a group."""
    chosen = dict(given)
    if "sinks" in chosen:
        chosen["sinks"] = sinks(heads[0], chosen["sinks"])
    if "alibi_slopes" in chosen:
        chosen["alibi_slopes"] = slopes(len(USED), heads[0]) * 0.02
    for head_dim, dtype in ((64, BF16), (128, FP16)):
        call = cached(head_dim, dtype, rows, heads, **chosen)
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
