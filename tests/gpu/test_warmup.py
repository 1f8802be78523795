"""After `flashvar warmup`, here or without the GPU, Triton compiles nothing more for such calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashvar
from flashvar.binaries.kinds import Architecture

pytestmark = pytest.mark.kernels_of("triton")
SOURCES = Path(flashvar.__file__).parents[1]
CALLS = """
import torch, flashvar
q = torch.randn(3, 77, 6, 64, device="cuda", dtype=torch.bfloat16)
k = torch.randn(3, 95, 2, 64, device="cuda", dtype=torch.bfloat16)
flashvar.attention(q, k, k, causal=True, backend="triton")
cache = torch.randn(3, 4000, 3, 64, device="cuda", dtype=torch.bfloat16)
flashvar.attention(q[:, :1], cache, cache, causal=True, backend="triton")
q.requires_grad_()
flashvar.attention(q, k, k, causal=True, backend="triton", scale=0.3).sum().backward()
"""


@pytest.fixture(autouse=True)
def device() -> None:
    """Only where Triton compiles for a device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device that Triton would compile for")


@pytest.mark.parametrize("place", ["here", "without the GPU"])
def test_a_warm_cache_is_all_that_calls_need(place: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(SOURCES), "TRITON_CACHE_DIR": str(tmp_path)}
    name = Architecture(*torch.cuda.get_device_capability()).name
    where = {"here": ["--all"], "without the GPU": ["--arch", name]}[place]
    absent = {} if place == "here" else {"CUDA_VISIBLE_DEVICES": ""}
    words = ["--head-dim", "64", "--causal", "--backward", *where]
    warm = [sys.executable, "-m", "flashvar", "warmup", *words]
    subprocess.run(warm, env={**environ, **absent}, check=True)
    before = set(tmp_path.glob("*/*.cubin"))
    # The forward with and without log-sum-exp, dQ, dK and dV; for a query of 1, 2, 4 or 8 heads two
    # kernels each, and three that merge.
    assert len(before) == 4 + 8 + 3
    subprocess.run([sys.executable, "-c", CALLS], env=environ, check=True)
    assert set(tmp_path.glob("*/*.cubin")) == before
