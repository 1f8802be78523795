"""A few queries on many keys and values whose rows start inside a line of 128 bytes.

Kernels of 9.0 move such rows to the lines between head dims 64 and 128, if there are as many tiles
as the GPU has SMs. tests/kernels/test_wgmma_forward_tiles.py asserts that they do so here.
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
HEAD_DIMS = [72, 80, 88, 96, 104, 112]
SEQUENCES, KEYS = 33, 1217  # 264 tiles of 8 heads
LINE = 64  # elements of 128 bytes


def placed(values: torch.Tensor, distance: int, over: int = 0, apart: int = 0) -> torch.Tensor:
    """The same values in rows that start `distance` elements after a line, NaN around them.

    The distance of the next position is `over` larger, that of the next sequence `apart`.
    """
    batch, length, heads, head_dim = values.shape
    wide = -(-heads * head_dim // LINE) * LINE + LINE + over
    room = values.new_full((batch * (length * wide + apart) + distance + LINE,), torch.nan)
    strides = (length * wide + apart, wide, head_dim, 1)
    return room.as_strided(values.shape, strides, distance).copy_(values)


def call_of(
    head_dim: int,
    queries: int,
    distances: tuple[int, int],
    heads: tuple[int, int] = (8, 8),
    keys: int = KEYS,
    apart: int = 0,
    **given: Any,
) -> Call:
    call = dense(head_dim, BF16, (queries, keys), heads, SEQUENCES, **given)
    k, v = (placed(x, of, 0, apart) for x, of in zip((call.k, call.v), distances, strict=True))
    return replace_inputs(call, {"k": k, "v": v})


@pytest.mark.parametrize("apart", [0, 24], ids=lambda n: f"apart{n}")
@pytest.mark.parametrize("distances", [(0, 0), (8, 8), (16, 56), (40, 24), (56, 0)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_distances(head_dim: int, distances: tuple[int, int], apart: int, backend: str) -> None:
    given: dict[str, Any] = {"distances": distances, "apart": apart}
    check(call_of(head_dim, 1, heads=(16, 8), **given), backend)
    check(call_of(head_dim, 5, causal=True, **given), backend)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_positions_whose_distances_differ(head_dim: int, backend: str) -> None:
    """Rows of k stay where they are, and rows of v are moved."""
    call = dense(head_dim, FP16, (3, KEYS), (8, 8), SEQUENCES)
    moved = {"k": placed(call.k, 8, over=8), "v": placed(call.v, 0)}
    check(replace_inputs(call, moved), backend)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_options(head_dim: int, backend: str) -> None:
    given: dict[str, Any] = {"head_dim": head_dim, "distances": (24, 48)}
    check(call_of(queries=1, sinks=sinks(8, FP32), **given), backend)
    check(call_of(queries=40, sinks=sinks(8, BF16), causal=True, **given), backend)
    check(call_of(queries=33, window=(1100, 2), **given), backend)
    check(call_of(queries=1, window=(1500, 0), keys=2100, heads=(16, 8), **given), backend)
    check(call_of(queries=64, scale=-0.1, **given), backend)
    for head_dim_v in (40, 64, 72, 128):
        check(call_of(queries=2, head_dim_v=head_dim_v, **given), backend)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_packed_sequences(head_dim: int, backend: str) -> None:
    """NaN after the keys in use; some sequences have no query or no key."""
    lengths = [1, 2, 1] * 11
    lengths[4] = 0
    lengths_k = [4200 - 90 * index for index in range(SEQUENCES)]
    lengths_k[7] = 0
    given: dict[str, Any] = {"heads": (8, 8), "outside": (3, 5)}
    check(packed(head_dim, BF16, lengths, lengths_k, **given), backend)
    used = [max(length - 70, 0) for length in lengths_k]
    check(packed(head_dim, BF16, lengths, lengths_k, used=used, **given), backend)


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads"),
    [(16, 200, 3001, (12, 12)), (4, 256, 5000, (16, 16)), (4, 129, 2000, (12, 12))],
    ids=str,
)
def test_tiles_of_128_queries(
    batch: int, queries: int, keys: int, heads: tuple[int, int], backend: str
) -> None:
    """Up to head dim 64: more queries than small tiles have, on many keys, in one split."""
    for head_dim, dtype, causal in ((64, BF16, False), (40, BF16, True), (64, FP16, True)):
        check(dense(head_dim, dtype, (queries, keys), heads, batch, causal=causal), backend)
    sink, window = sinks(heads[0], FP32), (1800, 3)
    check(dense(64, BF16, (queries, keys), heads, batch, sinks=sink, window=window), backend)
