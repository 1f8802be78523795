"""Calls that take the larger tiles of 9.0, of each variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, check, check_gradients
from features import bias, dense, modified, other_head_dim, packed, sinks
from oracle import Call

# Triton's kernels have one tile for all lengths.
pytestmark = pytest.mark.kernels_of("cuda")

BF16, FP16 = torch.bfloat16, torch.float16
# Enough tiles that small ones save no time, and keys are not divided; fewer in a rehearsal, for
# which the CPU would take long.
HEADS = (48, 24) if DEVICE == "cuda" else (2, 1)
LENGTHS = {
    "": (1222, 1281),
    "more-queries": (1222, 1100),
    "two-tiles": (340, 1155),
    "one-tile": (150, 1281),
    "few-queries": (64, 1281),
}
# Of the backward, whose tiles are chosen by the numbers of queries and keys alone.
FEWER_HEADS, BACKWARD = (HEADS[0] // 2, HEADS[1] // 2 or 1), (1153, 1281)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (1060, 20)},
    "window-left": {"window": (1100, 0), "causal": True},
}


def long_call(head_dim: int, dtype: torch.dtype, lengths: tuple[int, int], **given: Any) -> Call:
    return dense(head_dim, dtype, lengths, HEADS, batch=1, **given)


def backward_call(head_dim: int, dtype: torch.dtype, **given: Any) -> Call:
    return dense(head_dim, dtype, BACKWARD, FEWER_HEADS, batch=1, **given)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mask", OPTIONS)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(40, FP16), (64, BF16), (80, FP16), (96, BF16), (112, FP16), (128, BF16), (192, FP16)],
    ids=str,
)
def test_masks(head_dim: int, dtype: torch.dtype, mask: str, lengths: str, backend: str) -> None:
    check(long_call(head_dim, dtype, LENGTHS[lengths], **OPTIONS[mask]), backend)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "name", ["softcap", "alibi-batch", "sinks", "sinks-fp32", "dropout", "negative-scale"]
)
@pytest.mark.parametrize("head_dim", [64, 96, 128], ids=lambda d: f"d{d}")
def test_modifiers(head_dim: int, name: str, causal: bool, backend: str) -> None:
    for dtype in (BF16, FP16):
        given = modified(name, dtype, 1, HEADS[0])
        check(long_call(head_dim, dtype, LENGTHS[""], causal=causal, **given), backend)


@pytest.mark.parametrize("head_dim", [64, 128, 192], ids=lambda d: f"d{d}")
def test_other_head_dim_of_v(head_dim: int, backend: str) -> None:
    for causal in (False, True):
        given = {"head_dim_v": other_head_dim(head_dim), "causal": causal}
        check(long_call(head_dim, BF16, LENGTHS[""], **given), backend)


# tests/kernels/test_wgmma_forward_tiles.py asserts that these take steps of 80 keys.
WIDE = [(96, 77), (300, 77), (100, 257), (300, 65)]


@pytest.mark.parametrize("lengths", WIDE, ids=str)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 96, 104, 128], ids=lambda d: f"d{d}")
def test_small_tiles_of_80_keys(head_dim: int, lengths: tuple[int, int], backend: str) -> None:
    batch = 48 if DEVICE == "cuda" else 1
    for dtype in (BF16, FP16):
        given: dict[str, Any] = {"heads": (8, 8), "batch": batch}
        check(dense(head_dim, dtype, lengths, **given), backend)
        check(dense(head_dim, dtype, lengths, **given, sinks=sinks(8, dtype)), backend)
        other = other_head_dim(head_dim)
        check(dense(head_dim, dtype, lengths, **given, head_dim_v=other), backend)
        if lengths[1] <= 80:
            check(dense(head_dim, dtype, lengths, **given, causal=True), backend)


@pytest.mark.parametrize("kind", ["", "cache", "modifiers"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 80, 128], ids=lambda d: f"d{d}")
def test_packed_sequences_with_a_long_bound(
    head_dim: int, causal: bool, kind: str, backend: str
) -> None:
    """The bound chooses the tiles, whatever the lengths: also tails of others' keys and values."""
    lengths_q, lengths_k = (70, 1, 0, 300, 129, 64), (90, 5, 7, 257, 0, 200)
    given: dict[str, Any] = {"softcap": 5.0} if kind == "modifiers" else {}
    if kind == "cache":
        lengths_k = (300,) * 6
        given |= {"dense_keys": True, "used": (90, 0, 300, 299, 64, 1)}
    call = packed(head_dim, FP16, lengths_q, lengths_k, causal=causal, **given)
    check(call, backend, max_seqlen=2000)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("mask", OPTIONS)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128], ids=lambda d: f"d{d}")
def test_gradients(head_dim: int, mask: str, deterministic: bool, backend: str) -> None:
    for dtype in (BF16, FP16):
        call = backward_call(head_dim, dtype, **OPTIONS[mask])
        check_gradients(call, backend, deterministic=deterministic, lse_gradient=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["softcap", "alibi-batch", "dropout", "bias", "bias-for-all"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128], ids=lambda d: f"d{d}")
def test_gradients_of_modifiers(head_dim: int, name: str, causal: bool, backend: str) -> None:
    heads = FEWER_HEADS[0] if name == "bias" else 1
    given = (
        {"bias": bias(1, heads, BF16, BACKWARD)}
        if name.startswith("bias")
        else modified(name, BF16, 1, FEWER_HEADS[0])
    )
    check_gradients(backward_call(head_dim, BF16, causal=causal, **given), backend)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128], ids=lambda d: f"d{d}")
def test_gradients_of_packed_sequences(head_dim: int, causal: bool, backend: str) -> None:
    """Some of whose bound is long, and equal ones."""
    lengths_q, lengths_k = (70, 1, 0, 1200, 129, 64), (90, 5, 7, 1100, 0, 200)
    check_gradients(packed(head_dim, BF16, lengths_q, lengths_k, causal=causal), backend)
    equal = (512, 512)
    check_gradients(packed(head_dim, FP16, equal, equal, causal=causal), backend)
