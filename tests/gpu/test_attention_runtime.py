"""The device around a call: which binary, streams, graphs, other devices, torch.compile, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import (
    DEVICE,
    OPS,
    assert_served_by,
    attend,
    check,
    check_gradients,
    expected_architecture,
    require,
    run,
    skip_unless_compiled,
)
from features import dense, slopes
from oracle import Call, assert_gradients_right, assert_right

import flashvar
from flashvar.binaries import registry
from flashvar.errors import BackendUnavailableError, DeviceError, DtypeError, ShapeError
from flashvar.selection.request import Request
from flashvar.selection.resolve import choose

needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def make(length: int = 130, head_dim: int = 64, device: str = DEVICE) -> list[torch.Tensor]:
    return [torch.randn(2, length, 4, head_dim, device=device).bfloat16() for _ in range(3)]


@needs_cuda
def test_every_kernel_of_the_expected_binary_serves() -> None:
    skip_unless_compiled("cuda", torch.bfloat16, 64)
    wanted = expected_architecture()
    (binary,) = (one for one in registry.installed().binaries if one.kind.name == wanted)
    for row in binary.manifest.kernels:
        assert row.dtype is not None
        result = choose(Request.of(row.function, row.dtype, 0, **row.values), "cuda")
        assert_served_by("cuda", result)
        assert result.kernel == row


@needs_cuda
def test_side_stream(backend: str) -> None:
    call = Call(*(torch.empty_like(tensor) for tensor in make()), causal=True)
    values, grad_out = make(), make()[0]
    check_gradients(Call(*values, causal=True), backend)  # nothing is compiled while we race
    leaves = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for target, value in zip((call.q, call.k, call.v), values, strict=True):
            target.copy_(value)
        out, lse = run(Call(*leaves, causal=True), backend)
        grads = torch.autograd.grad(out, leaves, grad_out)
    stream.synchronize()
    assert_right(call, out, lse)
    assert_gradients_right(call, dict(zip("qkv", grads, strict=True)), grad_out)


@needs_cuda
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
def test_a_graph_of_both_directions(deterministic: bool, backend: str) -> None:
    call, grad_out = Call(*make(), causal=True), make()[0]
    for op in OPS:
        require(call, backend, op)
    leaves = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = run(Call(*leaves, causal=True), backend, deterministic=deterministic)
        return out, lse, *torch.autograd.grad(out, leaves, grad_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, *grads = step()
    for _ in range(3):
        for target, value in zip((call.q, call.k, call.v), make(), strict=True):
            target.copy_(value)
        for tensor in (out, lse, *grads):
            tensor.fill_(torch.nan)
        graph.replay()
        assert_right(call, out, lse)
        assert_gradients_right(call, dict(zip("qkv", grads, strict=True)), grad_out)


@needs_cuda
def test_another_device_than_the_current_one(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices, found one")
    assert torch.cuda.current_device() == 0
    call = Call(*make(device="cuda:1"), causal=True)
    check(call, backend)
    check_gradients(call, backend)
    assert torch.cuda.current_device() == 0


@pytest.mark.filterwarnings("default")  # inductor's own
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
def test_compiled_as_one_graph(gradients: bool, dynamic: bool, backend: str) -> None:
    for op in OPS:
        require(Call(*make()), backend, op)
    alibi = slopes(4)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        both = flashvar.attention(
            *(q * 2, k, v),
            causal=True,
            window_size=(50, 0),
            alibi_slopes=alibi,
            backend=backend,
            deterministic=True,
        )
        return both + 1

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for length in (65, 130):
        results = []
        tensors = make(length)
        for function in (layer, compiled):
            leaves = [tensor.detach().requires_grad_(gradients) for tensor in tensors]
            out = function(*leaves)
            results.append([out])
            if gradients:
                results[-1] += torch.autograd.grad(out, leaves, torch.ones_like(out))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


@needs_cuda
def test_under_autocast(backend: str) -> None:
    """Projections in bfloat16 feed it; gradients come back in float32 to the weights."""
    require(Call(*make()), backend, "attention_bwd")
    weight = torch.randn(256, 768, device=DEVICE, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        projected = torch.randn(2, 130, 256, device=DEVICE) @ weight
        q, k, v = projected.unflatten(-1, (3, 4, 64)).unbind(2)
        out = flashvar.attention(q, k, v, causal=True, backend=backend)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_second_derivatives_are_refused_in_words(backend: str) -> None:
    for op in OPS:
        require(Call(*make()), backend, op)
    leaves = [tensor.requires_grad_() for tensor in make()]
    out = flashvar.attention(*leaves, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(BackendUnavailableError, match="first derivatives only"):
        torch.autograd.grad(grad.sum(), leaves[1])


def test_the_reference_serves_when_named() -> None:
    q, k, v = (tensor.float() for tensor in make(33, 12))
    call = Call(q, k, v, causal=True, softcap=3.0)
    assert_right(call, *run(call, "reference"))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
def test_wrong_dtype(dtype: torch.dtype, backend: str) -> None:
    tensors = [tensor.to(dtype) for tensor in make()]
    with pytest.raises(DtypeError, match=f"found {dtype}"):
        flashvar.attention(*tensors, backend=backend)


@needs_cuda
@pytest.mark.parametrize("head_dim", [264, 512])
def test_wrong_head_dim(head_dim: int, backend: str) -> None:
    with pytest.raises(ShapeError, match=f"256.*found {head_dim}"):
        flashvar.attention(*make(9, head_dim), backend=backend)


BAD: dict[str, dict[str, Any]] = {
    "bias-of-other-length": {"bias": torch.zeros(1, 1, 130, 131)},
    "bias-of-other-heads": {"bias": torch.zeros(1, 3, 130, 130)},
    "bias-of-integers": {"bias": torch.zeros(1, 1, 130, 130, dtype=torch.int32)},
    "slopes-of-other-heads": {"alibi_slopes": torch.zeros(3)},
    "slopes-in-16-bits": {"alibi_slopes": torch.zeros(4, dtype=torch.bfloat16)},
    "negative-softcap": {"softcap": -1.0},
    "dropout-above-one": {"dropout_p": 1.5},
    "window-of-one-number": {"window_size": (3,)},
    "state-of-one-number": {"dropout_p": 0.5, "rng_state": torch.zeros(1, dtype=torch.int64)},
    "state-in-32-bits": {"dropout_p": 0.5, "rng_state": torch.zeros(2, dtype=torch.int32)},
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_options_are_refused_in_words(kind: str, backend: str) -> None:
    wrong = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in BAD[kind].items()
    }
    with pytest.raises(flashvar.errors.InvalidInputError, match=list(wrong)[-1]):
        flashvar.attention(*make(), **wrong, backend=backend)


@needs_cuda
def test_mixed_devices(backend: str) -> None:
    q, k, v = make(9)
    with pytest.raises(DeviceError, match=r"k on cpu"):
        flashvar.attention(q, k.cpu(), v, backend=backend)
    with pytest.raises(DeviceError, match=r"bias.*cpu"):
        flashvar.attention(q, k, v, bias=torch.zeros(1, 1, 9, 9), backend=backend)


@needs_cuda
def test_cpu_tensors_with_a_device_backend(backend: str) -> None:
    with pytest.raises(BackendUnavailableError, match="CPU"):
        flashvar.attention(*make(9, device="cpu"), backend=backend)


def test_a_head_dim_between_the_kernels(backend: str) -> None:
    """Not a multiple of 8: padded, with the scale of the head dim that was asked for."""
    call = dense(36, torch.bfloat16, causal=True)
    out, lse = attend(call, backend)
    assert out.shape == call.q.shape
    assert_right(call, out, lse)
    check_gradients(call, backend)
