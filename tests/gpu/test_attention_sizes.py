"""Sizes that break 16-bit grids and 32-bit offsets."""

from __future__ import annotations

import pytest
import torch
from device_call import attend, check, skip_unless_compiled
from oracle import Call, assert_right

import flashvar


@pytest.fixture(autouse=True)
def _memory() -> None:
    """Give back what earlier tests cached: some of these need tens of GiB."""
    torch.cuda.empty_cache()


def need(gibibytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of device memory, {free >> 30} are free")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("batch", "heads"),
    [
        (70_000, (1, 1)),
        (1, (65_537, 65_537)),
        (2, (65_536, 1)),
        (256, (256, 64)),
        (257, (256, 256)),
    ],
    ids=str,
)
def test_many_batches_and_heads(
    batch: int, heads: tuple[int, int], causal: bool, backend: str
) -> None:
    q = torch.randn(batch, 5, heads[0], 64, device="cuda").bfloat16()
    k, v = torch.randn(2, batch, 7, heads[1], 64, device="cuda").bfloat16()
    out, lse = attend(Call(q, k, v, causal), backend)
    for part in (slice(0, 2), slice(batch - 2, None)) if batch > 2 else (slice(None),):
        assert_right(Call(q[part], k[part], v[part], causal), out[part], lse[part])
    assert out.isfinite().all()


def normal(*shape: int) -> torch.Tensor:
    """Random bfloat16, made in place: a float32 original would triple the memory."""
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_queries_than_32_bits_count(head_dim: int, backend: str) -> None:
    skip_unless_compiled(backend, torch.bfloat16, head_dim)
    need(14)
    seqlen_q = 2**31 // (16 * head_dim) + 131
    q = normal(1, seqlen_q, 16, head_dim)
    k, v = normal(2, 1, 64, 2, head_dim)
    assert q.numel() > 2**31
    out, lse = flashvar.attention(q, k, v, return_lse=True, backend=backend)
    rows = torch.tensor([0, 1, seqlen_q // 2, seqlen_q - 132, seqlen_q - 1], device="cuda")
    assert_right(Call(q, k, v, rows=rows), out[:, rows], lse[..., rows])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_more_keys_than_32_bits_count(causal: bool, backend: str) -> None:
    skip_unless_compiled(backend, torch.bfloat16, 128)
    need(14)
    heads, seqlen_k = 64, 2**31 // (64 * 128) + 77
    q = normal(1, 70, heads, 128)
    k, v = normal(1, seqlen_k, heads, 128), normal(1, seqlen_k, heads, 128)
    assert k.numel() > 2**31
    out, lse = flashvar.attention(q, k, v, causal=causal, return_lse=True, backend=backend)
    for head in (slice(0, 1), slice(heads - 1, heads)):
        call = Call(q[:, :, head], k[:, :, head], v[:, :, head], causal)
        assert_right(call, out[:, :, head], lse[:, head])


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "sequence", "heads"])
def test_strides_that_reach_beyond_32_bits(dim: int, backend: str) -> None:
    skip_unless_compiled(backend, torch.bfloat16, 64)
    need(10)
    size = [3, 5, 4, 64]
    strides = [5 * 4 * 64, 4 * 64, 64, 1]
    strides[dim] = 2**31 // (size[dim] - 1) // 8 * 8 + 4096
    room = normal(strides[dim] * (size[dim] - 1) + 4096).fill_(torch.nan)
    far = room.as_strided(size, strides)
    far.copy_(torch.randn(size, device="cuda"))
    assert sum((n - 1) * step for n, step in zip(size, strides, strict=True)) > 2**31
    near = [torch.randn(size, device="cuda").bfloat16() for _ in range(2)]
    check(Call(far, *near, causal=True), backend)
    check(Call(near[0], far, near[1], causal=True), backend)
    check(Call(*near, far), backend)
