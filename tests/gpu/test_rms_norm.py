"""The norms of flashvar.layers on a device: values, gradients, layouts, graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_call import DEVICE

from flashvar.layers.norms import l2norm, rms_norm, rms_norm_gated
from flashvar.ops.rms_norm import formula

pytestmark = [pytest.mark.usefixtures("seed"), pytest.mark.kernels_of("triton")]
ON_DEVICE = pytest.mark.skipif(DEVICE == "cpu", reason="needs the device's kernel or its memory")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Call = Callable[..., Any]


@pytest.fixture
def the_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device torch's functions do not stand in for it."""

    def refuse(*_: object) -> None:
        raise AssertionError("torch's functions were called in place of the kernel")

    if DEVICE != "cpu":
        monkeypatch.setattr(formula, "forward", refuse)
        monkeypatch.setattr(formula, "backward", refuse)


def made(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(sizes, device=DEVICE).to(dtype)


def gated(activation: str) -> Call:
    return lambda x, g, w: rms_norm_gated(x, g, w, None, activation, eps=1e-5)


def of_sum(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    return rms_norm(x, w, b, residual, prenorm=True)


CALLS: dict[str, tuple[Call, str]] = {
    "plain": (lambda x, w: rms_norm(x, w, None), "xw"),
    "bias": (lambda x, w, b: rms_norm(x, w, b), "xww"),
    "swish": (gated("swish"), "xxw"),
    "sigmoid": (gated("sigmoid"), "xxw"),
    "residual": (of_sum, "xxww"),
    "l2": (l2norm, "x"),
}


def assert_right(call: Call, tensors: list[torch.Tensor]) -> None:
    """Results and gradients beside those of float64, by the ratio of norms."""
    found = measured(call, tensors, None)
    grads = found[1]
    expected = measured(call, [x.double() for x in tensors], grads)
    for place, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        error = (one.double() - other).norm() / other.norm().clamp(min=1e-30)
        assert error <= 1.5 * torch.finfo(one.dtype).eps + 1e-6, (place, float(error))


def measured(
    call: Call, tensors: list[torch.Tensor], grads: list[torch.Tensor] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    outs = list(out) if isinstance(out, tuple) else [out]
    if grads is None:
        grads = [torch.randn_like(one) for one in outs]
    given = [grad.to(one.dtype) for one, grad in zip(outs, grads, strict=True)]
    return [*(one.detach() for one in outs), *torch.autograd.grad(outs, leaves, given)], given


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [24, 128, 1000, 8192])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name: str, dim: int, dtype: torch.dtype) -> None:
    call, kinds = CALLS[name]
    for rows in ((2, 37), (5000,)):
        sizes = {"x": (*rows, dim), "w": (dim,)}
        assert_right(call, [made(*sizes[kind], dtype=dtype) for kind in kinds])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's functions compute in float64 alone."""
    for name in ("forward", "backward"):
        kept = getattr(formula, name)

        def checked(*given: Any, kept: Call = kept) -> Any:
            x = next(one for one in given if isinstance(one, formula.Tensors)).x
            assert DEVICE == "cpu" or x.dtype == torch.float64
            return kept(*given)

        monkeypatch.setattr(formula, name, checked)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "part": lambda: made(3, 50, 5, 160)[..., 16:144],
    "heads first": lambda: made(3, 5, 50, 128).transpose(1, 2),
    "every second": lambda: made(3, 50, 5, 256)[..., ::2],
    "odd start": lambda: made(3 * 50 * 5 * 128 + 1)[1:].view(3, 50, 5, 128),
    "expanded": lambda: made(128).expand(3, 50, 5, 128),
    "none": lambda: made(0, 50, 5, 128),
}


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    x, gate = LAYOUTS[layout](), LAYOUTS[layout]()
    assert_right(gated("swish"), [x, gate, made(128)])


@pytest.mark.usefixtures("the_kernel_serves")
def test_the_same_bits_every_time() -> None:
    tensors = [made(4000, 8, 128), made(4000, 8, 128), made(128, dtype=torch.float32)]
    first, grads = measured(gated("swish"), tensors, None)
    again, _ = measured(gated("swish"), tensors, grads)
    assert all(map(torch.equal, first, again))


@pytest.mark.usefixtures("the_kernel_serves")
def test_gradients_that_are_wanted_alone() -> None:
    """The same bits as beside the others, in calls that repeat."""
    leaves = [made(3, 700, 128).requires_grad_() for _ in range(3)]
    leaves += [made(128, dtype=dtype).requires_grad_() for dtype in (torch.bfloat16, torch.float32)]
    grad = made(3, 700, 128)

    def gradients(wanted: Sequence[int]) -> list[torch.Tensor]:
        given = [one if place in wanted else one.detach() for place, one in enumerate(leaves)]
        x, gate, residual, weight, bias = given
        y = rms_norm_gated(x, gate, weight, bias, residual=residual)
        return list(torch.autograd.grad(y, [given[place] for place in wanted], grad))

    expected = gradients(range(5))
    for wanted in ((0,), (1,), (2,), (3,), (4,), (0, 2), (0, 1, 4), (0, 3)):
        for _ in range(2):
            found = gradients(wanted)
            assert all(torch.equal(one, expected[i]) for i, one in zip(wanted, found, strict=True))


@ON_DEVICE
def test_more_than_32_bits() -> None:
    rows = 2**24 + 3
    x = torch.zeros(rows, 128, device=DEVICE, dtype=torch.bfloat16)
    x[-3:] = made(3, 128)
    x.requires_grad_()
    y = rms_norm(x, None, None)
    torch.testing.assert_close(y[-3:], rms_norm(x[-3:], None, None), rtol=0, atol=0)
    (found,) = torch.autograd.grad(y, x, x.detach())
    last = x.detach()[-3:].requires_grad_()
    (wanted,) = torch.autograd.grad(rms_norm(last, None, None), last, x.detach()[-3:])
    assert torch.equal(found[-3:], wanted)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", CALLS)
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    call, kinds = CALLS[name]
    sizes = {"x": (3, 40, 128), "w": (128,)}
    tensors = [made(*sizes[kind]) for kind in kinds]
    first, grads = measured(call, tensors, None)
    again, _ = measured(torch.compile(call, fullgraph=True), tensors, grads)
    torch.testing.assert_close(again, first)


def test_second_derivatives() -> None:
    x, gate = (made(3, 24, dtype=torch.float32).requires_grad_() for _ in range(2))
    wide = [one.detach().double().requires_grad_() for one in (x, gate)]
    found = []
    for leaves in ([x, gate], wide):
        y = gated("swish")(*leaves, None)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), leaves)
        found.append([one.double() for one in second])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@ON_DEVICE
@pytest.mark.usefixtures("the_kernel_serves")
def test_a_graph_is_replayed() -> None:
    x, gate, weight = made(64, 128), made(64, 128), made(128)
    rms_norm_gated(x, gate, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rms_norm_gated(x, gate, weight, None)
    x.copy_(made(64, 128))
    graph.replay()
    assert torch.equal(out, rms_norm_gated(x, gate, weight, None))
