"""Few key heads: the query heads of a group are divided among blocks, whose gradients are added."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from device_call import (
    DEVICE,
    OPS,
    check_gradients,
    differentiate,
    require,
    run,
)
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
LONG = 2048 if DEVICE == "cuda" else 300

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
}


@pytest.mark.parametrize(
    "heads", [(8, 1), (8, 2), (6, 2), (14, 2), (32, 8)], ids=lambda pair: "{}-{}".format(*pair)
)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256], ids=lambda d: f"d{d}")
def test_gradients_of_few_key_heads(head_dim: int, heads: tuple[int, int], backend: str) -> None:
    for mask in MASKS.values():
        check_gradients(dense(head_dim, BF16, (200, 330), heads, 1, **mask), backend)


@pytest.mark.parametrize("lengths", [(100, 100), (513, 1000), (1000, 513), (LONG, LONG)], ids=str)
@pytest.mark.parametrize("heads", [(8, 1), (5, 1), (7, 1)], ids=str)
def test_gradients_of_one_key_head(
    heads: tuple[int, int], lengths: tuple[int, int], backend: str
) -> None:
    call = dense(128, FP16, lengths, heads, 1, causal=True)
    check_gradients(call, backend, lse_gradient=True)


def few(d: int, t: torch.dtype, heads: tuple[int, int], **given: Any) -> Call:
    return dense(d, t, given.pop("lengths", (150, 270)), heads, **given)


# Unlike lengths, sequences without queries or keys, and queries without keys.
_SHORT_Q, _SHORT_K = (0, 65, 0, 30, 133, 0), (40, 70, 0, 0, 129, 0)
Group = tuple[int, int]
GRADIENTS: dict[str, Callable[[int, torch.dtype, Group], Case]] = {
    **{
        name: (
            lambda d, t, h, name=name: Case(few(d, t, h, **modified(name, t, 2, h[0]), causal=True))
        )
        for name in ("softcap", "alibi-batch", "dropout", "negative-scale")
    },
    "sinks": lambda d, t, h: Case(few(d, t, h, sinks=sinks(h[0], t)), lse_gradient=True),
    "sinks-blind": lambda d, t, h: Case(
        few(d, t, h, lengths=(270, 150), sinks=sinks(h[0], FP32), causal=True),
        deterministic=True,
    ),
    "bias": lambda d, t, h: Case(few(d, t, h, bias=bias(2, h[0], FP32))),
    "bias-per-head": lambda d, t, h: Case(
        few(d, t, h, bias=bias(1, h[0], t), causal=True), deterministic=True
    ),
    "bias-for-all": lambda d, t, h: Case(few(d, t, h, bias=bias(1, 1, t))),
    "window-deterministic": lambda d, t, h: Case(few(d, t, h, window=(30, 9)), deterministic=True),
    "one-query": lambda d, t, h: Case(few(d, t, h, lengths=(1, 1000)), lse_gradient=True),
    "one-key": lambda d, t, h: Case(few(d, t, h, lengths=(300, 1))),
    "head-dim-v": lambda d, t, h: Case(few(d, t, h, head_dim_v=other_head_dim(d), causal=True)),
    "heads-first": lambda d, t, h: Case(rearranged(few(d, t, h), heads_first), "bhsd"),
    "nan-around": lambda d, t, h: Case(rearranged(few(d, t, h), with_nan_around)),
    "odd-strides": lambda d, t, h: Case(rearranged(few(d, t, h), between_odd_elements)),
    "packed-zero-lengths": lambda d, t, h: Case(
        packed(d, t, _SHORT_Q, _SHORT_K, heads=h, causal=True), lse_gradient=True
    ),
    "packed-outside": lambda d, t, h: Case(
        packed(d, t, _SHORT_Q, _SHORT_K, heads=h, outside=(7, 90), window=(30, 10)),
        max_seqlen=1024,
    ),
    "packed-deterministic": lambda d, t, h: Case(
        packed(d, t, _SHORT_Q, _SHORT_K, heads=h, outside=(7, 90)), deterministic=True
    ),
    "packed-used": lambda d, t, h: Case(
        packed(d, t, (70, 130, 1, 64), (90, 40, 200, 64), heads=h, used=(90, 3, 0, 63))
    ),
    "packed-cache": lambda d, t, h: Case(
        packed(
            *(d, t, (70, 130, 1, 64), (200,) * 4),
            heads=h,
            dense_keys=True,
            used=(90, 1, 0, 200),
            causal=True,
        )
    ),
    "packed-extras": lambda d, t, h: Case(
        packed(
            *(d, t, _SHORT_Q, _SHORT_K),
            heads=h,
            alibi_slopes=slopes(6, h[0]),
            sinks=sinks(h[0], t),
            dropout_p=0.2,
            rng_state=rng_state(),
            causal=True,
        )
    ),
}


@pytest.mark.parametrize(
    ("head_dim", "dtype", "heads"),
    [(64, BF16, (8, 1)), (128, FP16, (6, 2)), (256, BF16, (14, 2))],
    ids=["d64-bf16-8-1", "d128-fp16-6-2", "d256-bf16-14-2"],
)
@pytest.mark.parametrize("feature", GRADIENTS)
def test_gradients_of_groups(
    feature: str, head_dim: int, dtype: torch.dtype, heads: Group, backend: str
) -> None:
    GRADIENTS[feature](head_dim, dtype, heads).check_gradients(backend)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_some_gradients_of_one_key_head(wanted: str, backend: str) -> None:
    call = few(64, BF16, (8, 1), causal=True)
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    found = differentiate(call, backend, grad_out, wanted=tuple(wanted))
    assert set(found) == set(wanted)
    assert_gradients_right(call, found, grad_out)


@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("kind", ["full", "causal", "bias-for-all", "packed-zero-lengths"])
def test_a_deterministic_backward_of_groups_repeats(kind: str, head_dim: int, backend: str) -> None:
    """Bitwise, also after one of another size."""
    if kind in MASKS:
        call = dense(head_dim, BF16, (500, 500), (8, 1), 1, **MASKS[kind])
    else:
        call = GRADIENTS[kind](head_dim, BF16, (14, 2)).call
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    first = differentiate(call, backend, grad_out, deterministic=True)
    for lengths in ((100, 100), (700, 300)):
        other = few(head_dim, BF16, (6, 2), lengths=lengths)
        differentiate(other, backend, other.q, deterministic=True)
        again = differentiate(call, backend, grad_out, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


@needs_cuda
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
def test_a_graph_of_gradients_of_one_key_head(deterministic: bool, backend: str) -> None:
    call = dense(128, BF16, (300, 300), (8, 1), 1, causal=True)
    for op in OPS:
        require(call, backend, op)
    leaves = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
    grad_out = torch.randn_like(call.q)

    def step() -> tuple[torch.Tensor, ...]:
        out, _ = run(Call(*leaves, causal=True), backend, deterministic=deterministic)
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
def test_streams_of_one_key_head_do_not_disturb_each_other(backend: str) -> None:
    """Deterministic backwards on four streams at once give what each gives alone."""
    calls = [dense(64, BF16, (rows, rows), (8, 1), 1, causal=True) for rows in (100, 333, 500, 64)]
    for op in OPS:
        require(calls[0], backend, op)
    leaves = [[t.detach().requires_grad_() for t in (c.q, c.k, c.v)] for c in calls]
    grads_out = [torch.randn_like(call.q) for call in calls]

    def once(number: int) -> tuple[torch.Tensor, ...]:
        out, _ = run(Call(*leaves[number], causal=True), backend, deterministic=True)
        return torch.autograd.grad(out, leaves[number], grads_out[number])

    assert_undisturbed([partial(once, number) for number in range(4)])
