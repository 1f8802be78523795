"""How tensors lie in memory: strides, views of packed storage, offsets, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from device_call import DEVICE, attend, check, check_gradients, differentiate, require
from features import dense, packed
from oracle import Call, assert_gradients_right
from random_cases import heads_first, with_nan_around

DIMS = pytest.mark.parametrize("head_dim", [40, 64, 128], ids=lambda d: f"d{d}")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def check_both(call: Call, backend: str, layout: str = "bshd") -> None:
    check(call, backend, layout)
    check_gradients(call, backend, layout=layout)


@MASKS
@DIMS
def test_packed_qkv(head_dim: int, causal: bool, backend: str) -> None:
    qkv = torch.randn(2, 131, 3, 4, head_dim, device=DEVICE).bfloat16()
    check_both(Call(*qkv.unbind(2), causal), backend)


@DIMS
def test_packed_heads(head_dim: int, backend: str) -> None:
    heads = torch.randn(2, 131, 8, head_dim, device=DEVICE).half()
    check_both(Call(*heads.split([4, 2, 2], dim=2), causal=True), backend)


@DIMS
def test_sequence_first(head_dim: int, backend: str) -> None:
    call = dense(head_dim, torch.bfloat16)
    tensors = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (call.q, call.k, call.v))
    check_both(Call(*tensors, causal=True), backend)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "sequence", "heads"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_expanded(which: str, dim: int, backend: str) -> None:
    call = dense(64, torch.bfloat16, causal=True)
    tensor = getattr(call, which)
    expanded = tensor.narrow(dim, 0, 1).expand_as(tensor)
    check_both(Call(**{**vars(call), which: expanded}), backend)


def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, `offset` elements after an address of 16 bytes."""
    room = tensor.new_full((tensor.numel() + 16,), torch.nan)
    view = room[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
    assert view.data_ptr() % 16 == offset * tensor.element_size() % 16
    return view


@DIMS
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_storage_off_16_bytes(offset: int, head_dim: int, backend: str) -> None:
    call = dense(head_dim, torch.bfloat16, causal=True)
    odd = {name: moved(getattr(call, name), offset) for name in ("q", "k", "v")}
    check_both(Call(**{**vars(call), **odd}), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["16-bit", "fp32"])
@pytest.mark.parametrize("offset", [1, 2])
def test_bias_off_16_bytes(offset: int, dtype: torch.dtype, backend: str) -> None:
    call = dense(64, torch.bfloat16, (150, 201))
    bias = moved(torch.randn(2, 4, 150, 201, device=DEVICE).to(dtype), offset)
    check_both(Call(**{**vars(call), "bias": bias}), backend)


def test_addresses_that_change_between_calls(backend: str) -> None:
    """Calls of one kind whose bias is on 16 bytes, or not."""
    call = dense(64, torch.bfloat16, (150, 201))
    bias = torch.randn(2, 4, 150, 201, device=DEVICE).bfloat16()
    for offset in (0, 1, 0, 2, 1, 8):
        check_both(Call(**{**vars(call), "bias": moved(bias, offset)}), backend)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (2,)], ids=str)
def test_expanded_bias(dims: tuple[int, ...], backend: str) -> None:
    call = dense(64, torch.bfloat16)
    shape = [1 if dim in dims else size for dim, size in enumerate((2, 4, 150, 270))]
    bias = torch.randn(shape, device=DEVICE).bfloat16().expand(2, 4, 150, 270)
    check_both(Call(**{**vars(call), "bias": bias}), backend)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@DIMS
def test_odd_strides(head_dim: int, which: str, backend: str) -> None:
    call = dense(head_dim, torch.half)
    tensor = getattr(call, which)
    room = torch.full((*tensor.shape[:-1], head_dim + 1), torch.nan, device=DEVICE).half()
    check_both(Call(**{**vars(call), which: room[..., 1:].copy_(tensor)}), backend)


def test_packed_rows_with_odd_strides(backend: str) -> None:
    call = packed(64, torch.half, (70, 5), (90, 33), causal=True)
    rooms = {}
    for name in ("q", "k", "v"):
        tensor = getattr(call, name)
        room = torch.full((*tensor.shape[:-1], 65), torch.nan, device=DEVICE).half()
        rooms[name] = room[..., 1:].copy_(tensor)
    check_both(Call(**{**vars(call), **rooms}), backend)


@pytest.mark.parametrize(
    "storage", ["expanded", "heads-first", "nan-around", "off-16-bytes", "odd", "last-dim"]
)
@DIMS
def test_strides_of_the_incoming_gradient(head_dim: int, storage: str, backend: str) -> None:
    call = dense(head_dim, torch.bfloat16, causal=True)
    values = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    room = torch.full((*values.shape[:-1], head_dim + 1), torch.nan, device=DEVICE).bfloat16()
    grad_out = {
        "expanded": lambda: values[:, :1, :1, :1].expand_as(values),
        "heads-first": lambda: heads_first(values),
        "nan-around": lambda: with_nan_around(values),
        "off-16-bytes": lambda: moved(values, 3),
        "odd": lambda: room[..., 1:].copy_(values),
        "last-dim": lambda: values.mT.contiguous().mT,
    }[storage]()
    found = differentiate(call, backend, grad_out)
    assert_gradients_right(call, found, grad_out)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_gradients_of_some_inputs(wanted: str, backend: str) -> None:
    call = dense(64, torch.bfloat16, causal=True)
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    found = differentiate(call, backend, grad_out, wanted=tuple(wanted))
    assert set(found) == set(wanted)
    assert_gradients_right(call, found, grad_out)


@pytest.mark.parametrize("with_bias", [False, True], ids=["bias-alone", "bias-wanted-too"])
def test_gradients_with_a_bias(with_bias: bool, backend: str) -> None:
    call = dense(64, torch.bfloat16, bias=torch.randn(1, 4, 150, 270, device=DEVICE))
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    wanted = ("q", "bias") if with_bias else ("bias",)
    assert_gradients_right(call, differentiate(call, backend, grad_out, wanted=wanted), grad_out)


def test_a_gradient_of_the_log_sum_exp_alone(backend: str) -> None:
    call = dense(64, torch.bfloat16, causal=True)
    grad_lse = torch.randn(2, 4, 150, device=DEVICE)
    found = differentiate(call, backend, None, grad_lse, wanted=("q", "k"))
    assert_gradients_right(call, found, None, grad_lse)


@MASKS
@DIMS
def test_nothing_is_written_outside(head_dim: int, causal: bool, backend: str) -> None:
    """Neighbours of the tensors that the operator allocates stay as they were."""
    call = dense(head_dim, torch.bfloat16, (77, 131), causal=causal)
    require(call, backend)
    if DEVICE == "cpu":
        pytest.skip("looks into the blocks of the CUDA allocator")
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    differentiate(call, backend, grad_out)  # compiled, and its memory cached
    torch.cuda.synchronize()
    # All free memory of the allocator's small blocks becomes 7; the outputs are cut out of it.
    sentinels = [torch.full((1 << 18,), 7.0, device=DEVICE) for _ in range(16)]
    free, kept = sentinels[::2], sentinels[1::2]
    del sentinels
    free.clear()
    attend(call, backend)
    differentiate(call, backend, grad_out)
    assert all(bool((room == 7).all()) for room in kept)
