"""A few queries on keys and values whose rows start inside a line of 128 bytes.

Kernels of 9.0 move such rows to the lines if the head dim is between 64 and 128. They do so with
several splits (few sequences), and with many keys.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import check
from features import dense, packed, replace_inputs, sinks
from oracle import Call

# Triton's kernels have one tile for all calls.
pytestmark = pytest.mark.kernels_of("cuda")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEAD_DIMS = [72, 80, 88, 96, 104, 112, 120]
# Sequences, keys: in several splits, and whole.
SIZES = {"splits": (2, 2417), "whole": (33, 1217)}
LINE = 64  # elements of 128 bytes


def placed(values: torch.Tensor, distance: int, over: int = 0) -> torch.Tensor:
    """The same values in rows that start `distance` elements after a line, NaN around them.

    The distance of the next position is `over` larger.
    """
    *sizes, heads, head_dim = values.shape
    wide = -(-(distance + heads * head_dim) // LINE) * LINE + over
    room = values.new_full((*sizes, wide), torch.nan)
    rows = room[..., distance : distance + heads * head_dim].unflatten(-1, (heads, head_dim))
    return rows.copy_(values)


def call_of(
    head_dim: int, size: str, queries: int, distances: tuple[int, int], **given: Any
) -> Call:
    batch, keys = SIZES[size]
    call = dense(head_dim, BF16, (queries, keys), (16, 8), batch, **given)
    of_k, of_v = distances
    return replace_inputs(call, {"k": placed(call.k, of_k), "v": placed(call.v, of_v)})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("distances", [(0, 0), (8, 8), (16, 56), (40, 24), (56, 0)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_distances(head_dim: int, distances: tuple[int, int], size: str, backend: str) -> None:
    check(call_of(head_dim, size, 1, distances), backend)
    check(call_of(head_dim, size, 5, distances, causal=True), backend)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_each_position_at_another_distance(head_dim: int, size: str, backend: str) -> None:
    batch, keys = SIZES[size]
    call = dense(head_dim, FP16, (3, keys), (8, 8), batch)
    moved = {"k": placed(call.k, 8, over=8), "v": placed(call.v, 0)}
    check(replace_inputs(call, moved), backend)
    check(dense(head_dim, FP16, (1, keys), (6, 3), batch), backend)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_options(head_dim: int, size: str, backend: str) -> None:
    given = {"head_dim": head_dim, "size": size, "distances": (24, 48)}
    check(call_of(**given, queries=1, sinks=sinks(16, FP32)), backend)
    check(call_of(**given, queries=40, window=(700, 0), causal=True), backend)
    check(call_of(**given, queries=33, window=(1300, 2)), backend)
    for head_dim_v in (40, 64, 72, 128):
        check(call_of(**given, queries=2, head_dim_v=head_dim_v), backend)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_packed_sequences(head_dim: int, backend: str) -> None:
    """NaN after the keys in use."""
    few, many = [1, 0, 2, 1], [1, 2, 1] * 11
    for lengths, keys in ((few, 2417), (many, 1217)):
        lengths_k = [keys - 9 * index for index in range(len(lengths))]
        call = packed(head_dim, BF16, lengths, lengths_k, heads=(16, 8), outside=(3, 5))
        check(call, backend)
        used = [length - 70 for length in lengths_k]
        check(packed(head_dim, BF16, lengths, lengths_k, heads=(16, 8), used=used), backend)


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads"),
    [(16, 200, 3001, (12, 12)), (4, 256, 5000, (16, 16)), (16, 130, 1500, (12, 4))],
    ids=str,
)
def test_tiles_of_128_queries(
    batch: int, queries: int, keys: int, heads: tuple[int, int], backend: str
) -> None:
    """Up to head dim 64: more queries than small tiles have, on many keys, in one split."""
    for head_dim, causal in ((64, False), (40, True)):
        check(dense(head_dim, BF16, (queries, keys), heads, batch, causal=causal), backend)
