"""Every feature, forward and backward, at all sizes of head and in both dtypes, against float64."""

from __future__ import annotations

import pytest
import torch
from device_call import check
from features import FEATURES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

pytestmark = [
    pytest.mark.parametrize("feature", FEATURES),
    pytest.mark.parametrize("head_dim", [16, 40, 64, 96, 128, 192, 256], ids=lambda d: f"d{d}"),
    pytest.mark.parametrize("dtype", DTYPES),
]


def test_forward(feature: str, head_dim: int, dtype: str, backend: str) -> None:
    case = FEATURES[feature](head_dim, DTYPES[dtype])
    check(case.call, backend, case.layout, case.max_seqlen)


def test_backward(feature: str, head_dim: int, dtype: str, backend: str) -> None:
    FEATURES[feature](head_dim, DTYPES[dtype]).check_gradients(backend)
