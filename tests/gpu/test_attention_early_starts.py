"""Inputs that the preceding kernel still writes when attention's first kernel may start (PDL).

Kernels of causal_conv1d let the next kernel of the stream start as soon as all of their blocks
have. It must wait for their results.
"""

from __future__ import annotations

import pytest
import torch
from device_call import DEVICE, require
from oracle import Call

import flashvar

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")

ROUNDS = 6
# batch, queries, keys, heads of q and of k, head dim, causal
SIZES = {
    "general": (2, 2000, 2000, 12, 12, 64, False),
    "masked": (2, 1024, 1024, 16, 16, 128, True),
    "wide": (1, 1024, 1024, 8, 8, 256, True),
    "short": (64, 128, 128, 8, 8, 64, False),
    "divided-keys": (1, 1, 8192, 32, 8, 128, False),
    "divided-keys-merged-by-a-kernel": (1, 1, 32768, 4, 2, 128, False),
    "divided-keys-40-rows": (1, 40, 4096, 8, 8, 64, False),
    "divided-keys-65-rows": (1, 65, 4096, 8, 8, 64, False),
    "divided-keys-256": (1, 1, 8192, 16, 4, 256, False),
    # On 9.0 more tiles than an H200 has SMs, so that they share them: no early start.
    "one-query": (33, 1, 1024, 32, 8, 128, False),
    # As many small tiles as it runs at a time: with fewer, no early start.
    "twenty-queries": (33, 20, 1024, 8, 8, 128, False),
    "few-queries": (4, 4, 4096, 16, 4, 128, True),
}


def convolved(batch: int, length: int, heads: int, head_dim: int, count: int) -> torch.Tensor:
    """Tensors [count, batch, length, heads, head_dim] that a kernel of causal_conv1d has written.

    They lie in memory that held NaN before.
    """
    x = torch.randn(count * batch, length, heads * head_dim, device=DEVICE).bfloat16()
    weight = torch.randn(heads * head_dim, 4, device=DEVICE).bfloat16()
    torch.full_like(x, torch.nan)  # freed at once, so that the results take its memory
    # The kernel starts late, so that all kernels after it are launched before it ends.
    torch.cuda._sleep(2_000_000)
    result = flashvar.causal_conv1d(x, weight)
    assert isinstance(result, torch.Tensor)
    return result.view(count, batch, length, heads, head_dim)


@pytest.mark.parametrize("size", SIZES)
def test_the_forward_waits_for_the_kernel_before_it(size: str, backend: str) -> None:
    batch, queries, keys, heads, heads_kv, head_dim, causal = SIZES[size]
    q = torch.randn(batch, queries, heads, head_dim, device=DEVICE).bfloat16()
    require(Call(q, *(q[:, :, :heads_kv] for _ in range(2)), causal=causal), backend)
    for _ in range(ROUNDS):
        k, v = convolved(batch, keys, heads_kv, head_dim, 2)
        found = flashvar.attention(q, k, v, causal=causal, backend=backend)
        torch.cuda.synchronize()
        expected = flashvar.attention(q, k, v, causal=causal, backend=backend)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [size for size in SIZES if SIZES[size][1] > 1])
def test_the_backward_waits_for_the_kernel_before_it(size: str, backend: str) -> None:
    batch, queries, keys, heads, heads_kv, head_dim, causal = SIZES[size]
    q = torch.randn(batch, queries, heads, head_dim, device=DEVICE).bfloat16()
    k, v = torch.randn(2, batch, keys, heads_kv, head_dim, device=DEVICE).bfloat16()
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    require(Call(q.detach(), k.detach(), v.detach(), causal=causal), backend, "attention_bwd")
    out = flashvar.attention(*leaves, causal=causal, deterministic=True, backend=backend)
    for _ in range(ROUNDS):
        (grad_out,) = convolved(batch, queries, heads, head_dim, 1)
        found = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        torch.cuda.synchronize()
        expected = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
