"""Gradients of short sequences: blocks that have all keys of a sequence store dQ themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_call import DEVICE, check_gradients, differentiate
from features import (
    Case,
    between_odd_elements,
    bias,
    dense,
    modified,
    other_head_dim,
    packed,
    rearranged,
    rng_state,
    sinks,
    slopes,
)
from oracle import Call, assert_gradients_right
from random_cases import heads_first, with_nan_around

from flashvar import InvalidInputError

# Triton's kernels have one tile for all lengths.
pytestmark = pytest.mark.kernels_of("cuda")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Lengths = tuple[int, int]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (20, 7)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 192], ids=lambda d: f"d{d}")
def test_lengths(head_dim: int, mask: str, backend: str) -> None:
    for length in (1, 15, 49, 64, 65, 77, 100, 128, 129, 160):
        check_gradients(dense(head_dim, BF16, (length, length), **MASKS[mask]), backend)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [40, 64, 72, 96], ids=lambda d: f"d{d}")
def test_many_sequences(head_dim: int, mask: str, backend: str) -> None:
    """So many that small tiles take fewer rounds than large ones."""
    call = dense(head_dim, BF16, (160, 160), (8, 8), 20, **MASKS[mask])
    check_gradients(call, backend)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128], ids=lambda d: f"d{d}")
def test_unequal_lengths(head_dim: int, mask: str, backend: str) -> None:
    """Also queries that see no key, and query blocks of them alone."""
    for lengths in ((300, 49), (49, 300), (1, 64), (64, 1), (400, 100), (3, 128), (200, 129)):
        check_gradients(dense(head_dim, FP16, lengths, **MASKS[mask]), backend, lse_gradient=True)


def short(d: int, t: torch.dtype, lengths: Lengths, **given: Any) -> Call:
    return dense(d, t, lengths, (4, 2), **given)


def sequences(d: int, t: torch.dtype, lengths: Lengths, **given: Any) -> Call:
    """Packed; without queries, without keys, without either; the longest has `lengths`."""
    tq, tk = lengths
    lengths_q, lengths_k = (tq, 0, 0, 30, 1, 2 * tq), (tk, 40, 0, 0, tk // 2, 17)
    return packed(d, t, lengths_q, lengths_k, **given)


def cache(d: int, t: torch.dtype, lengths: Lengths, **given: Any) -> Call:
    """Packed queries on dense keys, of which some sequences use none."""
    tq, tk = lengths
    used = (tk, 1, 0, tk - 1)
    return packed(d, t, (tq, 130, 1, 64), (tk,) * 4, dense_keys=True, used=used, **given)


FEATURES: dict[str, Callable[[int, torch.dtype, Lengths], Case]] = {
    **{
        f"{name}-{mask}": (
            lambda d, t, n, name=name, mask=mask: Case(
                short(d, t, n, **modified(name, t, 2, 4), **MASKS[mask])
            )
        )
        for name in ("softcap", "alibi-batch", "dropout", "negative-scale")
        for mask in ("full", "causal")
    },
    "causal": lambda d, t, n: Case(short(d, t, n, causal=True), lse_gradient=True),
    "all-modifiers": lambda d, t, n: Case(
        short(
            *(d, t, n),
            softcap=4.0,
            alibi_slopes=slopes(2, 4),
            bias=bias(2, 4, t, n),
            dropout_p=0.2,
            rng_state=rng_state(),
            causal=True,
        )
    ),
    "sinks": lambda d, t, n: Case(short(d, t, n, sinks=sinks(4, t)), lse_gradient=True),
    "bias": lambda d, t, n: Case(short(d, t, n, bias=bias(2, 4, t, n))),
    "bias-fp32": lambda d, t, n: Case(short(d, t, n, bias=bias(2, 4, FP32, n), causal=True)),
    "bias-per-head": lambda d, t, n: Case(short(d, t, n, bias=bias(1, 4, t, n))),
    "bias-for-all": lambda d, t, n: Case(short(d, t, n, bias=bias(1, 1, t, n))),
    "deterministic": lambda d, t, n: Case(short(d, t, n, causal=True), deterministic=True),
    "head-dim-v": lambda d, t, n: Case(short(d, t, n, head_dim_v=other_head_dim(d))),
    "heads-first": lambda d, t, n: Case(rearranged(short(d, t, n), heads_first), "bhsd"),
    "nan-around": lambda d, t, n: Case(rearranged(short(d, t, n), with_nan_around)),
    "odd-strides": lambda d, t, n: Case(rearranged(short(d, t, n), between_odd_elements)),
    "odd-strides-bias": lambda d, t, n: Case(
        rearranged(short(d, t, n, bias=bias(1, 1, t, n)), between_odd_elements)
    ),
    "odd-strides-deterministic": lambda d, t, n: Case(
        rearranged(short(d, t, n, causal=True), between_odd_elements), deterministic=True
    ),
    "packed": lambda d, t, n: Case(sequences(d, t, n), lse_gradient=True),
    "packed-causal": lambda d, t, n: Case(sequences(d, t, n, causal=True), max_seqlen=500),
    "packed-outside": lambda d, t, n: Case(sequences(d, t, n, outside=(7, 90), window=(30, 10))),
    "packed-deterministic": lambda d, t, n: Case(sequences(d, t, n), deterministic=True),
    "packed-modifiers": lambda d, t, n: Case(
        sequences(
            *(d, t, n),
            alibi_slopes=slopes(6, 4),
            sinks=sinks(4, t),
            dropout_p=0.2,
            rng_state=rng_state(),
        )
    ),
    "packed-tiny": lambda d, t, n: Case(packed(d, t, (5,) * 40, (n[1] // 4,) * 40)),
    "cache": lambda d, t, n: Case(cache(d, t, n)),
    "cache-causal": lambda d, t, n: Case(cache(d, t, n, causal=True)),
    "cache-softcap": lambda d, t, n: Case(cache(d, t, n, softcap=4.0)),
}


@pytest.mark.parametrize("lengths", [(49, 49), (150, 40), (77, 77), (200, 128)], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(32, FP16), (64, BF16), (96, FP16), (128, BF16)], ids=str
)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(
    feature: str, head_dim: int, dtype: torch.dtype, lengths: Lengths, backend: str
) -> None:
    FEATURES[feature](head_dim, dtype, lengths).check_gradients(backend)


@pytest.mark.parametrize("length", [49, 64, 100, 128])
@pytest.mark.parametrize("head_dim", [32, 64, 128], ids=lambda d: f"d{d}")
def test_a_deterministic_backward_repeats(head_dim: int, length: int, backend: str) -> None:
    call = dense(head_dim, BF16, (2 * length, length), (6, 2), 30)
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    first = differentiate(call, backend, grad_out, deterministic=True)
    for _ in range(3):
        again = differentiate(call, backend, grad_out, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
def test_sequences_longer_than_the_call_says(head_dim: int, backend: str) -> None:
    """Several blocks then store dQ of a sequence: it is NaN, other gradients are right."""
    call = packed(head_dim, BF16, (20, 300), (20, 300), heads=(2, 2))
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    if DEVICE == "cpu":  # where lengths are read before the call
        with pytest.raises(InvalidInputError, match="longest sequence"):
            differentiate(call, backend, grad_out, max_seqlen=32)
        return
    found = differentiate(call, backend, grad_out, max_seqlen=32)
    assert found["q"][20:].isnan().all()
    found["q"][20:] = differentiate(call, backend, grad_out)["q"][20:]
    assert_gradients_right(call, found, grad_out)
