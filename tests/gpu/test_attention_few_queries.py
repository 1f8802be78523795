"""A few queries per sequence: they and the heads of a group are rows of one tile.

That is so with many keys, and with fewer if there are many sequences.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, check, run
from features import (
    between_odd_elements,
    dense,
    modified,
    other_head_dim,
    rearranged,
    sinks,
)
from graphs_and_streams import captured
from oracle import Call, assert_right
from random_cases import heads_first, with_nan_around

# Triton's kernels have one tile for all calls.
pytestmark = pytest.mark.kernels_of("cuda")

needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KEYS = 2417
SEQUENCES, FEWER_KEYS = 64, 301
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (700, 2)},
    "window-left": {"window": (300, 0), "causal": True},
    "window-short": {"window": (1, 0)},
}
Heads = tuple[int, int]
# Windows that hide whole blocks of so many keys, and enough sequences that the heads are packed all
# the same, as tests/kernels/test_wgmma_forward_tiles.py asserts: sequences, heads, window.
WINDOWED_KEYS = 1217
WINDOWS: list[tuple[int, Heads, tuple[int, int]]] = [
    (50, (8, 2), (700, 2)),
    (50, (8, 2), (300, 0)),
    (50, (6, 2), (700, 2)),
    (50, (7, 1), (700, 2)),
    (24, (24, 2), (700, 2)),
    (24, (24, 2), (300, 0)),
    (24, (64, 1), (300, 0)),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [2, 3, 4, 8, 13, 16, 32, 33])
@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (8, 2), (7, 1), (24, 2), (64, 1)], ids=str)
def test_masks(heads: Heads, queries: int, mask: str, backend: str) -> None:
    """Also groups of 3, 7 and 12, of which tiles have rows without a head."""
    for head_dim, dtype in ((128, BF16), (64, FP16)):
        check(dense(head_dim, dtype, (queries, KEYS), heads, **MASKS[mask]), backend)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [2, 7, 16])
@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 112, 192, 256], ids=lambda d: f"d{d}")
def test_head_dims(head_dim: int, queries: int, mask: str, backend: str) -> None:
    check(dense(head_dim, BF16, (queries, KEYS), (8, 2), **MASKS[mask]), backend)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [2, 5, 16])
@pytest.mark.parametrize("heads", [(8, 2), (12, 2)], ids=str)
def test_many_sequences(heads: Heads, queries: int, mask: str, backend: str) -> None:
    lengths = (queries, FEWER_KEYS)
    for head_dim, dtype in ((128, BF16), (64, FP16), (80, BF16), (256, FP16)):
        check(dense(head_dim, dtype, lengths, heads, SEQUENCES, **MASKS[mask]), backend)


@pytest.mark.parametrize(("batch", "heads", "window"), WINDOWS, ids=str)
@pytest.mark.parametrize("queries", [2, 5, 8])
def test_windows(
    queries: int, batch: int, heads: Heads, window: tuple[int, int], backend: str
) -> None:
    lengths = (queries, WINDOWED_KEYS)
    for head_dim, dtype in ((128, BF16), (64, FP16), (40, BF16), (192, BF16)):
        check(dense(head_dim, dtype, lengths, heads, batch, window=window), backend)


@pytest.mark.parametrize(
    ("batch", "keys"),
    [(batch, keys) for batch in (1, 3, 50) for keys in (511, 512, 513, 700, 4096, 20_001)]
    + [(300, keys) for keys in (63, 64, 127, 128, 400)],
)
def test_numbers_of_parts(batch: int, keys: int, backend: str) -> None:
    for queries in (4, 15):
        check(dense(64, BF16, (queries, keys), (8, 2), batch, causal=True), backend)


def few(head_dim: int, dtype: torch.dtype, batch: int, **given: Any) -> Call:
    keys = FEWER_KEYS if batch == SEQUENCES else KEYS
    return dense(head_dim, dtype, (5, keys), (12, 2), batch, **given)


@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("batch", [2, SEQUENCES])
def test_features(batch: int, causal: bool, head_dim: int, backend: str) -> None:
    given = {"causal": causal, "batch": batch}
    for sink in (FP32, BF16):
        check(few(head_dim, BF16, sinks=sinks(12, sink), **given), backend)
    for name in ("softcap", "alibi-batch", "dropout", "negative-scale"):
        check(few(head_dim, FP16, **modified(name, FP16, batch, 12), **given), backend)
    check(few(head_dim, BF16, head_dim_v=other_head_dim(head_dim), **given), backend)
    check(rearranged(few(head_dim, BF16, **given), heads_first), backend, "bhsd")
    check(rearranged(few(head_dim, FP16, **given), with_nan_around), backend)
    check(rearranged(few(head_dim, FP16, **given), between_odd_elements), backend)


def test_results_repeat(backend: str) -> None:
    call = dense(128, BF16, (4, 8000), (32, 8), 4, causal=True)
    first = run(call, backend)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(call, backend), strict=True))


@needs_cuda
def test_a_graph(backend: str) -> None:
    call = dense(128, BF16, (4, 3000), (8, 2), causal=True)
    graph, results = captured(lambda: run(call, backend))
    for _ in range(3):
        for tensor in (call.q, call.k, call.v):
            tensor.normal_()
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert_right(call, *results)
