"""Few queries on Triton: programs share the keys of a sequence, and another kernel merges them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from device_call import DEVICE, check, run
from features import dense, modified, packed, rearranged, sinks
from oracle import Call, assert_gradients_right, assert_right
from random_cases import heads_first

pytestmark = pytest.mark.kernels_of("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (700, 1)},
    "window-one-key": {"window": (0, 0)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [(1, 512), (1, 3000), (2, 20_000), (70, 700)], ids=str)
def test_sizes(size: tuple[int, int], mask: str, backend: str) -> None:
    batch, keys = size
    for queries in (1, 3, 8, 17, 100):
        for head_dim, dtype in ((64, FP16), (128, BF16)):
            check(dense(head_dim, dtype, (queries, keys), (4, 4), batch, **MASKS[mask]), backend)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 136, 192, 256])
@pytest.mark.parametrize("size", [(1, 2000), (70, 600)], ids=str)
def test_head_dims(size: tuple[int, int], head_dim: int, backend: str) -> None:
    batch, keys = size
    for queries, heads in ((1, (2, 2)), (5, (8, 2))):
        check(dense(head_dim, BF16, (queries, keys), heads, batch, causal=True), backend)
        other = 128 if head_dim < 128 else 64
        check(dense(head_dim, FP16, (queries, keys), heads, batch, other), backend)


@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (32, 1), (128, 1)], ids=str)
@pytest.mark.parametrize("size", [(1, 30_000), (3, 700), (140, 60)], ids=str)
def test_groups(size: tuple[int, int], heads: tuple[int, int], backend: str) -> None:
    batch, keys = size
    for queries in (1, 3):
        for sink in (None, sinks(heads[0], FP32), sinks(heads[0], BF16)):
            given = {"causal": True, "sinks": sink}
            check(dense(128, BF16, (queries, keys), heads, batch, **given), backend)


@pytest.mark.parametrize(
    "name", ["softcap", "alibi", "bias", "negative-scale", "zero-scale", "sinks"]
)
@pytest.mark.parametrize("size", [(1, 3000), (60, 800)], ids=str)
def test_features(size: tuple[int, int], name: str, backend: str) -> None:
    batch, keys = size
    for queries in (1, 5):
        if name == "bias":
            given = {"bias": torch.randn(1, 6, queries, keys, dtype=FP16, device=DEVICE)}
        else:
            given = modified(name, FP16, batch, 6)
        call = dense(64, FP16, (queries, keys), (6, 3), batch, **given)
        check(call, backend)
        check(rearranged(call, heads_first), backend, "bhsd")


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_packed_queries_on_a_cache(heads: tuple[int, int], backend: str) -> None:
    """Sequences without queries or keys, and rows that belong to none."""
    used = (0, 1, 3000, 64, 333, 2)
    for queries in ((1, 1, 0, 1, 1, 1), (1, 8, 0, 5, 6, 2)):
        given: dict[str, Any] = {"dense_keys": True, "used": used, "heads": heads}
        for sink in (None, sinks(heads[0], FP32)):
            call = packed(
                128, BF16, queries, (3000,) * 6, outside=(3, 5), causal=True, sinks=sink, **given
            )
            check(call, backend)


def test_the_same_bits_every_time(backend: str) -> None:
    call = dense(128, BF16, (1, 9000), (32, 8), 2)
    first = run(call, backend)
    for _ in range(5):
        for x, y in zip(run(call, backend), first, strict=True):
            assert torch.equal(x, y)


def test_more_than_2_to_the_31_elements_of_keys(backend: str) -> None:
    """Each sequence of the batch is compared on its own."""
    call = dense(128, BF16, (1, 70_000), (8, 8), 31)
    out, lse = run(call, backend)
    for batch in (0, 15, 30):
        one = slice(batch, batch + 1)
        part = Call(call.q[one], call.k[one], call.v[one])
        assert_right(part, out[one], lse[one])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # the profiler's own
@pytest.mark.parametrize("name", ["softcap", "alibi", "bias"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_that_names_no_backend(grad: bool, name: str, backend: str) -> None:
    """Also where a binary serves it, which divides no keys of calls with score modifiers."""
    del backend
    given = modified(name, BF16, 1, 8) if name != "bias" else {}
    call = dense(128, BF16, (1, 9000), (8, 2), 1, causal=True, **given)
    if name == "bias":
        call = replace(call, bias=torch.randn(1, 8, 1, 9000, dtype=BF16, device=DEVICE))
    if grad:
        named = {"q": call.q, "k": call.k, "v": call.v}
        leaves = {name: x.detach().requires_grad_() for name, x in named.items()}
        out, _ = run(replace(call, **leaves), "auto")
        grad_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, [*leaves.values()], grad_out)
        assert_gradients_right(call, dict(zip(leaves, grads, strict=True)), grad_out)
        return
    assert_right(call, *run(call, "auto"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(call, "auto")
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.name.endswith("_kernel")]
    assert sorted(kernels) == ["split_kv_kernel", "split_kv_merge_kernel"]
