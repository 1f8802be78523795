"""At most 32 rows per tile: decoding. Kernels of 9.0 have tiles of 8, 16 and 32 rows for it.

A tile is one block, or a few that merge its results in shared memory, or more that write them for
another kernel to merge, by the numbers of tiles and keys. Blocks share SMs where they are many.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, check, replace_inputs, run
from features import dense, modified, other_head_dim, packed, rearranged, sinks
from graphs_and_streams import captured
from oracle import Call, assert_right
from random_cases import heads_first, with_nan_around

# Triton's kernels for few queries are tested in test_attention_split_kv.py.
pytestmark = pytest.mark.kernels_of("cuda")

needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Sequences and keys. With four heads of k: 4 to 480 tiles, of one block to some dozen.
SIZES = [(1, 1), (1, 127), (1, 3000), (2, 20_000), (5, 700), (30, 129), (40, 300), (120, 65)]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 1)},
    "window-one-key": {"window": (0, 0)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple[int, int], mask: str, backend: str) -> None:
    """Also one row more than a tile has."""
    batch, keys = size
    for rows in (1, 3, 8, 9, 16, 17):
        for head_dim, dtype in ((64, FP16), (128, BF16)):
            check(dense(head_dim, dtype, (rows, keys), (4, 4), batch, **MASKS[mask]), backend)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [8, 32, 40, 72, 80, 88, 96, 104, 120, 136, 192, 200, 256])
@pytest.mark.parametrize("size", [(1, 130), (1, 2000), (3, 9000), (70, 300)], ids=str)
def test_head_dims(size: tuple[int, int], head_dim: int, mask: str, backend: str) -> None:
    batch, keys = size
    for rows, dtype in ((1, BF16), (7, FP16), (13, BF16)):
        check(dense(head_dim, dtype, (rows, keys), (2, 2), batch, **MASKS[mask]), backend)
    for rows in (2, 8):
        call = dense(head_dim, BF16, (rows, keys), (8, 2), batch, **MASKS[mask])
        check(call, backend)
    other = other_head_dim(head_dim)
    check(dense(head_dim, BF16, (2, keys), (8, 2), batch, other, **MASKS[mask]), backend)
    check(dense(head_dim, FP16, (6, keys), (8, 2), batch, other, **MASKS[mask]), backend)


@pytest.mark.parametrize(
    "heads", [(4, 2), (6, 2), (7, 1), (8, 1), (12, 1), (16, 1), (32, 1)], ids=str
)
@pytest.mark.parametrize(
    "size", [(1, 40), (1, 2000), (1, 30_000), (3, 700), (100, 60), (100, 200)], ids=str
)
def test_groups(size: tuple[int, int], heads: tuple[int, int], backend: str) -> None:
    """Heads of a group as rows of a tile; with sinks each row has its own."""
    batch, keys = size
    for queries in (1, 2, 3):
        for sink in (None, sinks(heads[0], FP32), sinks(heads[0], BF16)):
            given = {"causal": True, "sinks": sink}
            check(dense(128, BF16, (queries, keys), heads, batch, **given), backend)
            check(dense(64, FP16, (queries, keys), heads, batch, **given), backend)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_packed_sequences(heads: tuple[int, int], head_dim: int, backend: str) -> None:
    """Sequences without queries or keys, and rows that belong to none."""
    keys = (1, 700, 0, 3000, 129, 64)
    for queries in ((1, 1, 0, 1, 1, 1), (1, 8, 0, 5, 16, 2), (3, 7, 2, 1, 8, 0)):
        for causal in (False, True):
            given: dict[str, Any] = {"heads": heads, "outside": (3, 5), "causal": causal}
            check(packed(head_dim, BF16, queries, keys, **given), backend)
    used = (0, 1, 700, 64, 333, 2)
    for count in (1, 4, 16):
        caches: dict[str, Any] = {"dense_keys": True, "used": used, "heads": heads}
        check(packed(head_dim, FP16, (count,) * 6, (700,) * 6, causal=True, **caches), backend)


@pytest.mark.parametrize("keys", [(1, 700, 0, 300), (20_000, 5), (40, 65, 1, 0) * 40], ids=len)
@pytest.mark.parametrize("heads", [(4, 2), (7, 1), (24, 2), (32, 1)], ids=str)
def test_heads_of_single_packed_queries(
    heads: tuple[int, int], keys: tuple[int, ...], backend: str
) -> None:
    """Heads of a group are rows of a tile. Blocks look up the query; some sequences have none."""
    for queries in ((1,) * len(keys), (1, 0) * (len(keys) // 2), (0, 1) * (len(keys) // 2)):
        for head_dim, outside in ((64, (0, 0)), (128, (3, 5)), (256, (1, 200))):
            given: dict[str, Any] = {"heads": heads, "outside": outside, "causal": True}
            check(packed(head_dim, BF16, queries, keys, **given), backend)
            sink = sinks(heads[0], FP32)
            check(packed(head_dim, FP16, queries, keys, sinks=sink, **given), backend)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("keys", [(1, 700, 0, 300), (20_000, 5), (40, 65, 2, 0) * 30], ids=len)
@pytest.mark.parametrize("heads", [(4, 2), (7, 1), (24, 4), (32, 2)], ids=str)
def test_heads_of_a_few_packed_queries(
    heads: tuple[int, int], keys: tuple[int, ...], mask: str, backend: str
) -> None:
    """Speculative decoding: sequences differ in queries; a group has up to 128 rows."""
    for most, head_dim, outside in ((2, 64, (0, 0)), (3, 128, (3, 5)), (8, 256, (1, 200))):
        queries = [(most, 1, 0, most - 1)[i % 4] for i in range(len(keys))]
        given: dict[str, Any] = {"heads": heads, "outside": outside, **MASKS[mask]}
        check(packed(head_dim, BF16, queries, keys, **given), backend)
        sink = sinks(heads[0], FP32)
        check(packed(head_dim, FP16, queries, keys, sinks=sink, **given), backend)


@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("size", [(1, 500), (1, 3000), (60, 200)], ids=str)
def test_features(size: tuple[int, int], head_dim: int, backend: str) -> None:
    batch, keys = size
    for rows in (1, 5, 16):
        call = dense(head_dim, BF16, (rows, keys), (6, 6), batch, causal=True)
        check(call, backend)
        check(rearranged(call, heads_first), backend, "bhsd")
        check(rearranged(call, with_nan_around), backend)
        for name in ("negative-scale", "zero-scale", "sinks"):
            given = modified(name, FP16, batch, 6)
            check(dense(head_dim, FP16, (rows, keys), (6, 6), batch, **given), backend)


def spread(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The same values, in heads of more columns, which are NaN."""
    room = tensor.new_full((*tensor.shape[:-1], head_dim), torch.nan)
    return room[..., : tensor.shape[-1]].copy_(tensor)


@pytest.mark.parametrize("names", [("q",), ("k", "v"), ("k",), ("q", "k", "v")], ids=str)
@pytest.mark.parametrize("head_dim", [72, 80, 96, 104], ids=lambda d: f"d{d}")
def test_distances_of_heads(head_dim: int, names: tuple[str, ...], backend: str) -> None:
    """Which decide where rows start, and so which kernel loads them, but no size of a workspace."""
    calls = [
        packed(head_dim, BF16, (1,) * 16, (4200, 5, 700, 1) * 4, heads=(8, 8)),
        packed(head_dim, BF16, (1,) * 130, (4200, *(50,) * 129), heads=(1, 1)),
        dense(head_dim, BF16, (1, 4096), (120, 120), 1),
        dense(head_dim, BF16, (1, 4096), (120, 120), 1, head_dim_v=8),
    ]
    for call in calls:
        check(call, backend)
        check(replace_inputs(call, {n: spread(getattr(call, n), 128) for n in names}), backend)


@pytest.mark.parametrize("logit", [-1e4, -120.0, 1e4], ids=str)
@pytest.mark.parametrize("size", [(1, 300), (2, 5000)], ids=str)
def test_extreme_logits(size: tuple[int, int], logit: float, backend: str) -> None:
    batch, keys = size
    for rows in (1, 8, 12):
        call = dense(64, BF16, (rows, keys), (3, 3), batch)
        call.q.zero_()[..., 0] = logit
        call.k[..., 0] = 8.0
        check(call, backend)


def test_results_repeat(backend: str) -> None:
    for size in ((1, 1500), (2, 40_000), (100, 300)):
        call = dense(128, BF16, (1, size[1]), (8, 2), size[0])
        first = run(call, backend)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, run(call, backend), strict=True))


@needs_cuda
@pytest.mark.parametrize("size", [(1, 1500), (2, 40_000), (100, 300)], ids=str)
def test_a_graph(size: tuple[int, int], backend: str) -> None:
    call: Call = dense(128, BF16, (1, size[1]), (8, 2), size[0])
    graph, results = captured(lambda: run(call, backend))
    for _ in range(3):
        for tensor in (call.q, call.k, call.v):
            tensor.normal_()
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert_right(call, *results)
