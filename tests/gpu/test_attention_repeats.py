"""The same again: bitwise equal results, whatever else runs, and rows that ignore their batch."""

from __future__ import annotations

import pytest
import torch
from device_call import DEVICE, OPS, attend, require, run
from features import FEATURES, dense, packed
from oracle import Call

# A thousand on a device; a rehearsal shows that the test works.
REPEATS = 1000 if DEVICE == "cuda" else 2


def assert_repeats(call: Call, backend: str, deterministic: bool) -> None:
    """Every result of REPEATS forwards (and, deterministic, backwards) equals the first."""
    for op in OPS:
        require(call, backend, op)
    given = {name: vars(call)[name] for name in ("q", "k", "v", "bias")}
    named = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
    repeated, leaves = Call(**{**vars(call), **named}), list(named.values())
    grad_out = torch.randn(call.out_shape, device=DEVICE).to(call.q.dtype)

    def once() -> tuple[torch.Tensor, ...]:
        if not deterministic:
            return run(call, backend)
        out, lse = run(repeated, backend, deterministic=True)
        return out, lse, *torch.autograd.grad(out, leaves, grad_out)

    first = once()
    different = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(REPEATS):
        for result, expected in zip(once(), first, strict=True):
            different |= (result != expected).any()
    assert not different


@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_forward(causal: bool, head_dim: int, backend: str) -> None:
    call = dense(head_dim, torch.bfloat16, (777, 777), causal=causal)
    assert_repeats(call, backend, deterministic=False)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_deterministic_backward(causal: bool, head_dim: int, backend: str) -> None:
    call = dense(head_dim, torch.bfloat16, (777, 777), heads=(4, 1), causal=causal)
    assert_repeats(call, backend, deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 128, 192], ids=lambda d: f"d{d}")
@pytest.mark.parametrize(
    "feature",
    ["window-both", "dropout-causal", "packed-one-giant", "bias", "bias-per-head", "bias-for-all"],
)
def test_a_deterministic_backward_with(feature: str, head_dim: int, backend: str) -> None:
    case = FEATURES[feature](head_dim, torch.bfloat16)
    assert_repeats(case.call, backend, deterministic=True)


def test_torchs_deterministic_mode_is_obeyed(backend: str) -> None:
    call = dense(64, torch.bfloat16, (777, 777), heads=(4, 1), causal=True)
    for op in OPS:
        require(call, backend, op)
    leaves = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
    repeated = Call(*leaves, causal=True)
    grad_out = torch.randn_like(call.q)
    torch.use_deterministic_algorithms(True)
    try:
        found = [
            torch.autograd.grad(run(repeated, backend)[0], leaves, grad_out) for _ in range(20)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    by_flag = torch.autograd.grad(run(repeated, backend, deterministic=True)[0], leaves, grad_out)
    for grads in found:
        assert all(torch.equal(a, b) for a, b in zip(grads, by_flag, strict=True))


def test_a_row_does_not_depend_on_its_batch(backend: str) -> None:
    call = dense(64, torch.bfloat16, causal=True)
    both, _ = attend(call, backend)
    alone, _ = attend(Call(call.q[1:], call.k[1:], call.v[1:], causal=True), backend)
    assert torch.equal(both[1:], alone)


def test_a_sequence_does_not_depend_on_its_neighbours(backend: str) -> None:
    call = packed(64, torch.bfloat16, (100, 150, 31), (100, 150, 31), causal=True)
    together, _ = attend(call, backend)
    for part in call.parts():
        alone, _ = attend(part.call, backend)
        assert torch.equal(together[part.rows_q], alone[0])


def test_streams_do_not_disturb_each_other(backend: str) -> None:
    """Deterministic backwards on four streams at once give what each gives alone."""
    if DEVICE == "cpu":
        pytest.skip("streams need a device")
    calls = [dense(64, torch.bfloat16, (500, 500), causal=True) for _ in range(4)]
    for op in OPS:
        require(calls[0], backend, op)
    leaves = [[t.detach().requires_grad_() for t in (c.q, c.k, c.v)] for c in calls]
    grads_out = [torch.randn_like(call.q) for call in calls]

    def once(number: int) -> tuple[torch.Tensor, ...]:
        out, _ = run(Call(*leaves[number], causal=True), backend, deterministic=True)
        return torch.autograd.grad(out, leaves[number], grads_out[number])

    expected = [once(number) for number in range(4)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for _ in range(25):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((number, once(number)))
    torch.cuda.synchronize()
    for number, grads in found:
        assert all(torch.equal(a, b) for a, b in zip(grads, expected[number], strict=True))
