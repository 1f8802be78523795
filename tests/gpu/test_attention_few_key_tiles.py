"""Few key tiles: the queries of a head are divided among blocks, whose dK and dV are added."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from device_call import DEVICE, OPS, check_gradients, differentiate, require, run
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
from graphs_and_streams import assert_undisturbed, captured
from oracle import Call, assert_gradients_right
from random_cases import heads_first, with_nan_around

# Triton's kernels divide nothing, and compile for longer than all of this runs.
pytestmark = pytest.mark.kernels_of("cuda")

needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A rehearsal shows that the tests work: fewer rows where the CPU would take long.
LONG = 4096 if DEVICE == "cuda" else 300
# Lengths of two packed sequences, unlike and zero among them.
LONG_Q, LONG_K = (1100, 0, 700, 1), (77, 60, 300, 129)

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 900)},
}


def few(d: int, t: torch.dtype, **given: Any) -> Call:
    """One sequence of two heads: two key tiles, or four to ten if they are small."""
    return dense(d, t, given.pop("lengths", (1030, 200)), (2, 2), 1, **given)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256], ids=lambda d: f"d{d}")
def test_lengths(head_dim: int, mask: str, backend: str) -> None:
    """Cross attention; self attention; more keys than queries; query blocks that see nothing."""
    for lengths in (
        (LONG, 77),
        (1000, 1),
        (1100, 64),
        (900, 128),
        (700, 300),
        (513, 513),
        (500, 900),
    ):
        call = few(head_dim, BF16, lengths=lengths, **MASKS[mask])
        check_gradients(call, backend, lse_gradient=lengths[1] == 77)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_heads(batch: int, heads: tuple[int, int], backend: str) -> None:
    """Heads of a group are divided first, or as well."""
    for lengths in ((1500, 77), (600, 600)):
        for causal in (False, True):
            check_gradients(dense(64, FP16, lengths, heads, batch, causal=causal), backend)


@pytest.mark.parametrize("blocks", [3, 7, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("dims", [(40, 40), (96, 64), (136, 72), (192, 128), (256, 256)], ids=str)
def test_sums_of_parts(dims: tuple[int, int], blocks: int, backend: str) -> None:
    """A part for each query block; a warp adds up eight at a time, of 128 columns."""
    block = 128 if max(dims) <= 64 else 64
    call = dense(dims[0], BF16, (blocks * block, 77), (1, 1), 1, head_dim_v=dims[1])
    check_gradients(call, backend)


FEATURES: dict[str, Callable[[int, torch.dtype], Case]] = {
    **{
        name: lambda d, t, name=name: Case(few(d, t, **modified(name, t, 1, 2), causal=True))
        for name in ("softcap", "alibi-batch", "dropout", "negative-scale", "zero-scale")
    },
    "sinks": lambda d, t: Case(few(d, t, sinks=sinks(2, t)), lse_gradient=True),
    "bias": lambda d, t: Case(few(d, t, bias=bias(1, 2, FP32, (1030, 200)))),
    "bias-per-head": lambda d, t: Case(
        few(d, t, bias=bias(1, 2, t, (1030, 200)), causal=True), deterministic=True
    ),
    "bias-for-all": lambda d, t: Case(few(d, t, bias=bias(1, 1, t, (1030, 200)))),
    "bias-one-key-tile": lambda d, t: Case(
        few(d, t, lengths=(1030, 60), bias=bias(1, 2, t, (1030, 60)))
    ),
    "window-deterministic": lambda d, t: Case(few(d, t, window=(30, 9)), deterministic=True),
    "one-key-tile-dropout": lambda d, t: Case(
        few(d, t, lengths=(1030, 77), dropout_p=0.3, rng_state=rng_state())
    ),
    "head-dim-v": lambda d, t: Case(few(d, t, head_dim_v=other_head_dim(d), causal=True)),
    "heads-first": lambda d, t: Case(rearranged(few(d, t), heads_first), "bhsd"),
    "nan-around": lambda d, t: Case(rearranged(few(d, t), with_nan_around)),
    "odd-strides": lambda d, t: Case(rearranged(few(d, t), between_odd_elements)),
    "packed": lambda d, t: Case(
        packed(d, t, LONG_Q, LONG_K, heads=(2, 1), causal=True), lse_gradient=True
    ),
    "packed-one-key-tile": lambda d, t: Case(packed(d, t, LONG_Q, (77, 60, 0, 64), heads=(2, 2))),
    "packed-outside": lambda d, t: Case(
        packed(d, t, LONG_Q, LONG_K, heads=(1, 1), outside=(7, 90), window=(300, 100)),
        max_seqlen=2048,
    ),
    "packed-deterministic": lambda d, t: Case(
        packed(d, t, LONG_Q, LONG_K, heads=(2, 2), outside=(7, 90)), deterministic=True
    ),
    "packed-used": lambda d, t: Case(
        packed(d, t, LONG_Q, LONG_K, heads=(2, 2), used=(50, 0, 299, 129))
    ),
    "packed-cache": lambda d, t: Case(
        packed(
            *(d, t, LONG_Q, (200,) * 4),
            heads=(2, 2),
            dense_keys=True,
            used=(90, 1, 0, 200),
            causal=True,
        )
    ),
    "packed-extras": lambda d, t: Case(
        packed(
            *(d, t, LONG_Q, LONG_K),
            heads=(2, 2),
            alibi_slopes=slopes(4, 2),
            sinks=sinks(2, t),
            dropout_p=0.2,
            rng_state=rng_state(),
            causal=True,
        )
    ),
}


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, BF16), (128, FP16), (256, BF16)], ids=["d64", "d128", "d256"]
)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, head_dim: int, dtype: torch.dtype, backend: str) -> None:
    FEATURES[feature](head_dim, dtype).check_gradients(backend)


@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("feature", ["window-deterministic", "bias-for-all", "packed"])
def test_a_deterministic_backward_repeats(feature: str, head_dim: int, backend: str) -> None:
    """Bitwise, also after one of another size."""
    call = FEATURES[feature](head_dim, BF16).call
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    first = differentiate(call, backend, grad_out, deterministic=True)
    for lengths in ((2000, 64), (700, 300)):
        other = few(head_dim, BF16, lengths=lengths)
        differentiate(other, backend, other.q, deterministic=True)
        again = differentiate(call, backend, grad_out, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


@needs_cuda
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
def test_a_graph_of_gradients(deterministic: bool, backend: str) -> None:
    call = few(64, BF16, lengths=(1100, 77))
    for op in OPS:
        require(call, backend, op)
    leaves = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
    grad_out = torch.randn_like(call.q)

    def step() -> tuple[torch.Tensor, ...]:
        out, _ = run(Call(*leaves), backend, deterministic=deterministic)
        return torch.autograd.grad(out, leaves, grad_out)

    graph, grads = captured(step)
    for _ in range(3):
        for tensor in (call.q, call.k, call.v, grad_out):
            tensor.normal_()
        for grad in grads:
            grad.fill_(torch.nan)
        graph.replay()
        assert_gradients_right(call, dict(zip("qkv", grads, strict=True)), grad_out)


@needs_cuda
def test_streams_do_not_disturb_each_other(backend: str) -> None:
    """Deterministic backwards on four streams at once give what each gives alone."""
    calls = [few(64, BF16, lengths=(rows, 77)) for rows in (100, 333, 2500, 64)]
    for op in OPS:
        require(calls[0], backend, op)
    leaves = [[t.detach().requires_grad_() for t in (c.q, c.k, c.v)] for c in calls]
    grads_out = [torch.randn_like(call.q) for call in calls]

    def once(number: int) -> tuple[torch.Tensor, ...]:
        out, _ = run(Call(*leaves[number]), backend, deterministic=True)
        return torch.autograd.grad(out, leaves[number], grads_out[number])

    assert_undisturbed([partial(once, number) for number in range(4)])
