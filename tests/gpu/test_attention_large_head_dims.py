"""Head dims above 256, which Triton alone computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import check, check_gradients
from features import dense, modified, packed, rearranged
from random_cases import heads_first

pytestmark = pytest.mark.kernels_of("triton")

BF16, FP16 = torch.bfloat16, torch.float16
DIMS = [(264, 264), (320, 320), (384, 128), (64, 512), (512, 512)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (70, 3)}], ids=str)
def test_head_dims(mask: dict[str, Any], dims: tuple[int, int], backend: str) -> None:
    """With the gradients, and with few queries on many keys."""
    call = dense(dims[0], BF16, (150, 190), (4, 2), 2, dims[1], **mask)
    check(call, backend)
    check_gradients(call, backend, lse_gradient=True)
    check(dense(dims[0], FP16, (3, 5000), (8, 2), 1, dims[1], **mask), backend)


@pytest.mark.parametrize("name", ["softcap", "alibi", "sinks", "dropout", "negative-scale"])
def test_features(name: str, backend: str) -> None:
    call = dense(512, BF16, (130, 130), (2, 2), 2, causal=True, **modified(name, BF16, 2, 2))
    check(call, backend)
    check_gradients(call, backend)
    check(rearranged(call, heads_first), backend, "bhsd")


def test_packed_sequences(backend: str) -> None:
    call = packed(512, FP16, (40, 0, 130, 1), (70, 5, 130, 0), heads=(4, 2), causal=True)
    check(call, backend)
    check_gradients(call, backend)


def test_odd_head_dims(backend: str) -> None:
    """Copied into padded tensors."""
    call = dense(301, BF16, (50, 70), (2, 1), 1, 257)
    check(call, backend)
    check_gradients(call, backend)
