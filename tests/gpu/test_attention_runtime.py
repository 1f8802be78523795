"""The device around a call: which binary, streams, graphs, other devices, torch.compile, errors."""

from __future__ import annotations

import pytest
import torch
from device_call import (
    assert_served_by,
    attend,
    check,
    expected_architecture,
    skip_unless_compiled,
)
from oracle import Call, assert_right

import flashvar
from flashvar import registry
from flashvar.decide import choose
from flashvar.errors import BackendUnavailableError, DeviceError, DtypeError, ShapeError
from flashvar.verdicts import Request


def make(length: int = 130, head_dim: int = 64, device: str = "cuda") -> list[torch.Tensor]:
    return [torch.randn(2, length, 4, head_dim, device=device).bfloat16() for _ in range(3)]


def compiled_for(backend: str) -> str:
    skip_unless_compiled(backend, torch.bfloat16, 64)
    return backend


def test_every_kernel_of_the_expected_binary_serves() -> None:
    skip_unless_compiled("cuda", torch.bfloat16, 64)
    wanted = expected_architecture()
    (binary,) = (one for one in registry.installed().binaries if one.architecture.name == wanted)
    for row in binary.manifest.kernels:
        assert row.dtype is not None
        verdict = choose(Request(row.op, row.dtype, 0, row.head_dim), "cuda")
        assert_served_by("cuda", verdict)
        assert verdict.kernel == row


def test_side_stream(backend: str) -> None:
    call = Call(*(torch.empty_like(tensor) for tensor in make()), causal=True)
    values = make()
    attend(Call(*values, causal=True), backend)  # nothing is compiled or loaded while we race
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for target, value in zip((call.q, call.k, call.v), values, strict=True):
            target.copy_(value)
        out, lse = flashvar.attention(
            call.q, call.k, call.v, causal=True, return_lse=True, backend=backend
        )
    stream.synchronize()
    assert_right(call, out, lse)


def test_cuda_graph(backend: str) -> None:
    call = Call(*make(), causal=True)
    attend(call, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashvar.attention(
            call.q, call.k, call.v, causal=True, return_lse=True, backend=backend
        )
    for _ in range(3):
        for target, value in zip((call.q, call.k, call.v), make(), strict=True):
            target.copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        assert_right(call, out, lse)


def test_another_device_than_the_current_one(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices, found one")
    assert torch.cuda.current_device() == 0
    check(Call(*make(device="cuda:1"), causal=True), backend)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_200_repeats_are_bitwise_equal(causal: bool, head_dim: int, backend: str) -> None:
    call = Call(*make(777, head_dim), causal)
    first_out, first_lse = attend(call, backend)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(200):
        out, lse = flashvar.attention(
            call.q, call.k, call.v, causal=causal, return_lse=True, backend=backend
        )
        different |= (out != first_out).any() | (lse != first_lse).any()
    assert not different


def test_a_row_does_not_depend_on_its_batch(backend: str) -> None:
    call = Call(*make(), causal=True)
    both, _ = attend(call, backend)
    alone, _ = attend(Call(call.q[1:], call.k[1:], call.v[1:], causal=True), backend)
    assert torch.equal(both[1:], alone)


@pytest.mark.filterwarnings("default")  # inductor's own
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_as_one_graph(dynamic: bool, backend: str) -> None:
    compiled_for(backend)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashvar.attention(q * 2, k, v, causal=True, backend=backend) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for length in (65, 130):
        tensors = make(length)
        torch.testing.assert_close(compiled(*tensors), layer(*tensors))


def test_gradients(backend: str) -> None:
    compiled_for(backend)
    tensors = [tensor.requires_grad_() for tensor in make()]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    weights = torch.randn_like(tensors[0])
    out = flashvar.attention(*tensors, causal=True, backend=backend)
    found = torch.autograd.grad((out * weights).sum(), tensors)
    expected, _, _ = Call(*exact, causal=True).written_out(torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for grad, right in zip(found, wanted, strict=True):
        error = (grad.double() - right).abs().amax()
        assert error <= 2 * torch.finfo(torch.bfloat16).eps * right.abs().amax()


def test_opcheck(backend: str) -> None:
    compiled_for(backend)
    torch.library.opcheck(
        torch.ops.flashvar.attention_fwd.default, (*make(9), True, None, "bshd", backend)
    )


def test_the_reference_serves_when_named() -> None:
    q, k, v = (tensor.float() for tensor in make(33, 12))
    out, lse = flashvar.attention(q, k, v, return_lse=True, backend="reference")
    assert_right(Call(q, k, v), out, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
def test_wrong_dtype(dtype: torch.dtype, backend: str) -> None:
    tensors = [tensor.to(dtype) for tensor in make()]
    with pytest.raises(DtypeError, match=f"got {dtype}"):
        flashvar.attention(*tensors, backend=backend)


@pytest.mark.parametrize("head_dim", [4, 12, 264])
def test_wrong_head_dim(head_dim: int, backend: str) -> None:
    with pytest.raises(ShapeError, match=f"multiple of 8 from 8 to 256.*got {head_dim}"):
        flashvar.attention(*make(9, head_dim), backend=backend)


def test_mixed_devices(backend: str) -> None:
    q, k, v = make(9)
    with pytest.raises(DeviceError, match=r"k on cpu"):
        flashvar.attention(q, k.cpu(), v, backend=backend)


def test_cpu_tensors_with_a_device_backend(backend: str) -> None:
    with pytest.raises(BackendUnavailableError, match="CPU"):
        flashvar.attention(*make(9, device="cpu"), backend=backend)
