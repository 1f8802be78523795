"""gated_delta_rule on a device: Triton's kernels beside the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE

from flashvar.ops.gated_delta_rule.api import gated_delta_rule

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.skipif(DEVICE == "cpu", reason="asks the device's kernels"),
]

# Relative errors of out and final state.
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-4}


def made(
    seqlen: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    packed: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    batch, rows = (2, seqlen) if packed is None else (1, sum(packed))
    count = batch if packed is None else len(packed)
    few, many = heads
    given: dict[str, Any] = {
        "q": torch.randn(batch, rows, few, dims[0], device=DEVICE).to(dtype),
        "k": torch.randn(batch, rows, few, dims[0], device=DEVICE).to(dtype),
        "v": torch.randn(batch, rows, many, dims[1], device=DEVICE).to(dtype),
        "g": torch.randn(batch, rows, many, device=DEVICE),
        "beta": torch.randn(batch, rows, many, device=DEVICE),
        "A_log": torch.randn(many, device=DEVICE),
        "dt_bias": torch.randn(many, device=DEVICE),
        "initial_state": torch.randn(count, many, *dims, device=DEVICE),
        **{"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True},
    }
    if packed is not None:
        given["cu_seqlens"] = torch.tensor([0, *packed], device=DEVICE).cumsum(0).int()
    return given


def compared(given: dict[str, Any], limit: float) -> None:
    found = gated_delta_rule(**given, return_final_state=True, backend="triton")
    wide = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
    expected = gated_delta_rule(**wide, return_final_state=True, backend="reference")
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.isfinite(one).all()
        assert float((one.double() - other).norm() / other.norm()) <= limit


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("seqlen", [1, 31, 64, 1000])
@pytest.mark.parametrize("dims", [(128, 128), (96, 192), (8, 16), (256, 512), (40, 60)], ids=str)
def test_values(dims: tuple[int, int], seqlen: int, dtype: torch.dtype) -> None:
    compared(made(seqlen, (2, 4), dims, dtype), LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("packed", [(0, 100, 1, 0, 640, 65, 0), (3, 0, 2)], ids=str)
def test_packed(packed: tuple[int, ...], dtype: torch.dtype) -> None:
    compared(made(0, (2, 4), (128, 128), dtype, packed), LIMITS[dtype])


@pytest.mark.parametrize("seqlen", [1, 64])
def test_more_heads_than_an_axis_of_the_grid_has(seqlen: int) -> None:
    compared(made(seqlen, (5462, 32772), (8, 8), torch.bfloat16), LIMITS[torch.bfloat16])


def test_the_same_bits_again() -> None:
    given = made(300, (2, 4), (128, 128), torch.bfloat16)
    first, second = (gated_delta_rule(**given, backend="triton")[0] for _ in range(2))
    assert torch.equal(first, second)


def test_decoding_in_a_graph() -> None:
    """The pool is updated by each replay, at the indices that are there then."""
    given = made(1, (2, 4), (128, 128), torch.bfloat16)
    pool = torch.randn(5, 4, 128, 128, device=DEVICE)
    given["initial_state"], expected = pool, pool.clone()
    indices = torch.tensor([4, 1], device=DEVICE)
    gated_delta_rule(**{**given, "initial_state": pool.clone()}, state_indices=indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = gated_delta_rule(**given, state_indices=indices)
    indices.copy_(torch.tensor([2, -1]))
    graph.replay()
    other, _ = gated_delta_rule(
        **{**given, "initial_state": expected}, state_indices=indices, backend="reference"
    )
    torch.testing.assert_close(out, other, atol=0.02, rtol=0.02)
    torch.testing.assert_close(pool, expected, atol=1e-4, rtol=1e-4)
