"""Triton kernels on tensors whose strides are larger than 32 bits hold, in the interpreter."""

from __future__ import annotations

import sys

import pytest
from interpreter import interpreted

pytest.importorskip("triton", reason="triton is not installed")

# Pages of the mapping exist once they are written, so only its address range is that large.
_BIAS_GRADIENT = """
import mmap
from dataclasses import replace

import torch
from flashvar.backends.triton.attention import launch, tiles
from flashvar.ops.attention.problem import Gradients, Inputs, Options
from flashvar.ops.attention.validate import inspect, inspect_backward

NO_RESERVE = 0x4000  # which mmap names from Python 3.13 on
heads, size = 3, 16
torch.manual_seed(0)
q = torch.randn(1, size, heads, 16).half()
inputs = Inputs(q, q, q, bias=torch.zeros(1, heads, size, size).half())
options = Options(backend="triton")
tile = tiles.Tile(16, 16, 4, 1)
out, lse = torch.empty_like(q), torch.empty(1, heads, size)
launch.forward(inspect(inputs, options), tile)(inputs, out, lse)
found = []
for far in (size * size, 2**30):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    room = mmap.mmap(-1, ((heads - 1) * far + size * size) * 4, flags=flags)
    grad = torch.frombuffer(room, dtype=torch.float32).as_strided(
        (1, heads, size, size), (0, far, size, 1)
    )
    back = inspect_backward(inputs, options, q, True)
    back = replace(back, grad_bias=back.grad_bias._replace(heads=far))
    grads = Gradients(*(torch.empty_like(q) for _ in range(3)), grad)
    launch.backward(back, tile, tile, tile)(inputs, out, lse, q, None, grads)
    found.append(grad.contiguous())
print(all(found[0].abs().sum((2, 3)).flatten()), torch.equal(*found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
def test_heads_of_a_bias_gradient_may_be_far_apart(python: str) -> None:
    assert interpreted(python, "-W", "ignore", "-c", _BIAS_GRADIENT).split() == ["True", "True"]
