"""`Attend`: who computes is decided per call; the decision on fake devices."""

from __future__ import annotations

import logging

import fakes
import pytest
import torch

from flashvar.errors import BackendUnavailableError
from flashvar.integrations import attend as module
from flashvar.integrations import fallback
from flashvar.integrations.attend import Attend, Facts, decide
from flashvar.machine.system import Device
from flashvar.selection.request import Request
from flashvar.selection.rules import select

WHEELS = fakes.inventory("80", "86", "89", "90a")
DEVICES = {
    "7.5": fakes.T4,
    "8.0": fakes.A100,
    "8.6": fakes.RTX_3090,
    "8.9": fakes.L40S,
    "9.0": fakes.H200,
    "10.0": fakes.GB200,
    "12.0": fakes.RTX_5090,
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHVAR_STRICT", raising=False)
    monkeypatch.delenv("FLASHVAR_BACKEND", raising=False)
    monkeypatch.setattr(fallback, "_logged", set())


def decided(device: Device, dtype: str, head_dim: int, named: bool = False) -> str | None:
    """What is decided for a call on a device, from what selection says of it."""
    decision = select(
        Request.of("attention_fwd", dtype, 0, head_dim=head_dim), fakes.system(device), WHEELS
    )
    unserved = None if decision.chosen is not None else decision.explain()
    return decide(Facts("cuda", device.capability, named, unserved))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_capability(device: Device, dtype: str) -> None:
    for head_dim in (32, 40, 64, 128, 256, 512):
        reason = decided(device, dtype, head_dim)
        if device.capability >= (8, 0):
            assert reason is None
        else:
            assert reason == "a device of capability 7.5, below 8.0"


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_what_no_device_serves(device: Device) -> None:
    for dtype, head_dim in (("fp64", 64), ("bf16", 520), ("bf16", 20)):
        assert decided(device, dtype, head_dim) is not None


def test_a_named_backend_is_taken_on_old_devices_too() -> None:
    assert decided(fakes.T4, "fp16", 64, named=True) is None
    assert "needs capability 8.0" in str(decided(fakes.T4, "bf16", 64, named=True))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts("cpu", None, False, None), "CPU"),
        (Facts("cpu", None, True, None), None),
        (Facts("cuda", None, False, None), None),  # ROCm: its capability is another count
        (Facts("cuda", (8, 0), False, "no"), "no"),
        (Facts("xpu", None, False, "not xpu"), "not xpu"),
    ],
    ids=["cpu", "cpu-named", "rocm", "unserved", "xpu"],
)
def test_decide(facts: Facts, words: str | None) -> None:
    reason = decide(facts)
    assert reason is None if words is None else words in str(reason)


def computed(attend: Attend, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Output and gradients."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, 3, 7, 16, generator=generator).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 3, 9, 16, generator=generator).to(dtype) for _ in "kv")
    k.requires_grad_()
    v.requires_grad_()
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_all_ways_agree(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = computed(Attend(scale=scale))
    torch.testing.assert_close(computed(Attend(flash=True, scale=scale)), expected)
    calls = []
    ours = module.attend
    monkeypatch.setattr(module, "attend", lambda *words: calls.append(1) or ours(*words))
    found = computed(Attend(flash=True, scale=scale, backend="reference"))
    assert calls == [1]
    torch.testing.assert_close(found, expected)


def pixels(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """As a U-Net has them: channels of a convolution whose rows are strided, and a memory kept.

    q is a view of it, while k and v are joined with parameters, of float32 whatever autocast says.
    """
    channels = torch.randn(2, 3 * 4 * 8, 5 * 5).to(dtype)
    q, k, v = (x.unflatten(1, (4, 8)).transpose(2, 3) for x in channels.chunk(3, 1))
    memory = torch.randn(2, 4, 3, 8)
    return [q, torch.cat((memory, k), 2), torch.cat((memory, v), 2)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("lowered", [None, torch.bfloat16, torch.float16], ids=str)
def test_copies_and_casts_as_sdpa_does(
    lowered: torch.dtype | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    leaves = [x.requires_grad_() for x in pixels(lowered or torch.float32)]
    assert leaves[0].stride(-1) != 1
    assert lowered is None or leaves[0].dtype != leaves[1].dtype
    found = []
    for attend in (Attend(flash=True, backend="reference"), Attend(flash=True)):
        torch._dynamo.reset()
        call = torch.compile(attend, backend="eager", fullgraph=True) if compiled else attend
        with torch.autocast("cpu", lowered or torch.bfloat16, enabled=lowered is not None):
            assert (attend.why_not(*leaves) is None) == (attend.backend == "reference")
            out = call(*leaves)
        assert out.dtype == (lowered or torch.float32)
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
    tolerance = {} if lowered is None else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(*found, **tolerance)
    assert [x.dtype for x in found[0][1:]] == [x.dtype for x in leaves]


def test_dtypes_that_differ_are_torchs_to_refuse() -> None:
    q, k, v = pixels(torch.half)
    attend = Attend(flash=True, backend="reference")
    assert "dtype" in str(attend.why_not(q, k, v))
    with pytest.raises(RuntimeError, match="dtype"):
        attend(q, k, v)


def test_each_call_is_judged_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    attend = Attend(flash=True, backend="reference")
    served, other = torch.randn(2, 1, 2, 5, 8), torch.randn(5, 8)
    q, k = served
    with caplog.at_level(logging.WARNING, "flashvar"):
        for _ in range(2):
            assert attend.why_not(q, k, k) is None
            assert attend.why_not(other, other, other) is not None
            assert attend(q, k, k).shape == q.shape
            assert attend(other, other, other).shape == other.shape
    assert len(caplog.records) == 1
    assert "2 dimensions" not in str(attend.why_not(q, k, k))
    assert attend.why_not(q.half(), k.half(), k.half()) is None


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    attend, x = Attend(flash=True, backend="reference"), torch.randn(5, 8)
    with pytest.raises(BackendUnavailableError, match="Attend: expected a call"):
        attend(x, x, x)


def test_dropout_is_for_training() -> None:
    q = torch.randn(1, 1, 64, 8)
    for options in ({}, {"flash": True}, {"flash": True, "backend": "reference"}):
        attend = Attend(dropout=0.5, **options)
        assert not torch.equal(attend(q, q, q), attend(q, q, q))
        attend.eval()
        assert torch.equal(attend(q, q, q), attend(q, q, q))


def test_second_derivatives_without_flash() -> None:
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(Attend(), (q, q, q))


def test_compiles_into_one_graph() -> None:
    q = torch.randn(1, 2, 5, 8)
    for backend in ("auto", "reference"):
        attend = Attend(flash=True, backend=backend)
        torch._dynamo.reset()
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, q, q), attend(q, q, q))


def test_what_print_shows() -> None:
    assert repr(Attend(0.1, True)) == "Attend(dropout=0.1, flash=True, scale=None)"
