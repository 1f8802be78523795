"""Sizes that break 16-bit grids and 32-bit offsets, in both directions."""

from __future__ import annotations

import pytest
import torch
from device_call import DEVICE, attend, check, check_gradients, differentiate, require, run
from oracle import Call, assert_gradients_right, assert_right

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device and its memory"),
]


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
    q = torch.randn(batch, 5, heads[0], 64, device=DEVICE).bfloat16()
    k, v = torch.randn(2, batch, 7, heads[1], 64, device=DEVICE).bfloat16()
    call = Call(q, k, v, causal)
    out, lse = attend(call, backend)
    grad_out = torch.randn_like(q)
    grads = differentiate(call, backend, grad_out)
    for part in (slice(0, 2), slice(batch - 2, None)) if batch > 2 else (slice(None),):
        few = Call(q[part], k[part], v[part], causal)
        assert_right(few, out[part], lse[part])
        some = {name: grad[part] for name, grad in grads.items()}
        assert_gradients_right(few, some, grad_out[part])
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads.values())


def normal(*shape: int) -> torch.Tensor:
    """Random bfloat16, made in place: a float32 original would triple the memory."""
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_()


@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
def test_more_queries_than_32_bits_count(head_dim: int, backend: str) -> None:
    need(14)
    seqlen_q = 2**31 // (16 * head_dim) + 131
    call = Call(normal(1, seqlen_q, 16, head_dim), *normal(2, 1, 64, 2, head_dim))
    require(call, backend)
    assert call.q.numel() > 2**31
    out, lse = run(call, backend)
    rows = torch.tensor([0, 1, seqlen_q // 2, seqlen_q - 132, seqlen_q - 1], device=DEVICE)
    assert_right(Call(call.q, call.k, call.v, rows=rows), out[:, rows], lse[..., rows])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_more_keys_than_32_bits_count(causal: bool, backend: str) -> None:
    need(14)
    heads, seqlen_k = 64, 2**31 // (64 * 128) + 77
    q = normal(1, 70, heads, 128)
    k, v = normal(1, seqlen_k, heads, 128), normal(1, seqlen_k, heads, 128)
    require(Call(q, k, v), backend)
    assert k.numel() > 2**31
    out, lse = run(Call(q, k, v, causal), backend)
    for head in (slice(0, 1), slice(heads - 1, heads)):
        call = Call(q[:, :, head], k[:, :, head], v[:, :, head], causal)
        assert_right(call, out[:, :, head], lse[:, head])


@pytest.mark.parametrize("length", [5, 40])
def test_many_packed_sequences(length: int, backend: str) -> None:
    """More than a grid's 65,535, some of them empty, in both directions."""
    count = 70_000
    lengths = torch.arange(count, device=DEVICE) % (2 * length)
    lengths[-2:] = length
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    q, k, v, grad_out = torch.randn(4, int(bounds[-1]), 1, 64, device=DEVICE).bfloat16()
    call = Call(q, k, v, causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    out, lse = attend(call, backend)
    grads = differentiate(call, backend, grad_out)
    for rows in (slice(1, 3), slice(int(bounds[-2]), int(bounds[-1]))):  # of length 2, and the last
        few = Call(*(tensor[None, rows] for tensor in (q, k, v)), causal=True)
        assert_right(few, out[None, rows], lse[None, :, rows])
        some = {name: grad[None, rows] for name, grad in grads.items()}
        assert_gradients_right(few, some, grad_out[None, rows])
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
def test_gradients_of_more_elements_than_32_bits_count(deterministic: bool, backend: str) -> None:
    """Packed queries beyond 2^31 elements, and the float32 sums of their gradient twice that."""
    need(60)
    count, length, heads = 2**31 // (16 * 64 * 128) + 3, 128, 16
    total = count * length
    bounds = torch.arange(0, total + 1, length, dtype=torch.int32, device=DEVICE)
    q, grad_out = normal(total, heads, 64), normal(total, heads, 64)
    k, v = normal(total, 1, 64), normal(total, 1, 64)
    call = Call(q, k, v, causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    assert q.numel() > 2**31
    found = differentiate(call, backend, grad_out, deterministic=deterministic)
    for rows in (slice(0, 2 * length), slice(total - 2 * length, None)):
        few = Call(*(tensor[rows].unflatten(0, (2, length)) for tensor in (q, k, v)), causal=True)
        grads = {name: grad[rows].unflatten(0, (2, length)) for name, grad in found.items()}
        assert_gradients_right(few, grads, grad_out[rows].unflatten(0, (2, length)))


def test_a_bias_of_more_elements_than_32_bits_count(backend: str) -> None:
    need(30)
    heads, length = 16, 11_600
    bias = normal(1, heads, length, length)
    assert bias.numel() > 2**31
    call = Call(*(normal(1, length, heads, 64) for _ in range(3)), bias=bias)
    require(call, backend)
    out, lse = run(call, backend)
    rows = torch.tensor([0, length // 2, length - 1], device=DEVICE)
    last = {name: getattr(call, name)[:, :, -1:] for name in ("q", "k", "v")}
    few = Call(**last, bias=bias[:, -1:], rows=rows)
    assert_right(few, out[:, rows, -1:], lse[:, -1:, rows])


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "sequence", "heads"])
def test_strides_that_reach_beyond_32_bits(dim: int, backend: str) -> None:
    need(10)
    size = [3, 5, 4, 64]
    strides = [5 * 4 * 64, 4 * 64, 64, 1]
    strides[dim] = 2**31 // (size[dim] - 1) // 8 * 8 + 4096
    room = normal(strides[dim] * (size[dim] - 1) + 4096).fill_(torch.nan)
    far = room.as_strided(size, strides)
    far.copy_(torch.randn(size, device=DEVICE))
    assert sum((n - 1) * step for n, step in zip(size, strides, strict=True)) > 2**31
    near = [torch.randn(size, device=DEVICE).bfloat16() for _ in range(2)]
    for tensors in ((far, *near), (near[0], far, near[1]), (*near, far)):
        check(Call(*tensors, causal=True), backend)
        check_gradients(Call(*tensors, causal=True), backend)
