"""The forward of both backends against float64: shapes, masks, strides and values."""

from __future__ import annotations

import pytest
import torch
from device_call import attend, check, skip_unless_compiled
from oracle import Call
from random_cases import RandomCase, with_nan_around

from flashvar.ops.attention_plan import plan

DIMS = [40, 64, 128]


def make(
    seqlen_q: int = 150,
    seqlen_k: int = 200,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = ((seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1]))
    q, k, v = (
        torch.randn(batch, length, count, head_dim, device="cuda").to(dtype)
        for length, count in sizes
    )
    return q, k, v


def test_random(random_case: RandomCase, backend: str) -> None:
    layout = "bhsd" if random_case.storage == "heads-first" else "bshd"
    check(random_case.make(), backend, layout)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", DIMS)
def test_packed_qkv(head_dim: int, causal: bool, backend: str) -> None:
    packed = torch.randn(2, 131, 3, 4, head_dim, device="cuda").bfloat16()
    check(Call(*packed.unbind(2), causal), backend)


@pytest.mark.parametrize("head_dim", DIMS)
def test_packed_heads(head_dim: int, backend: str) -> None:
    packed = torch.randn(2, 131, 8, head_dim, device="cuda").half()
    check(Call(*packed.split([4, 2, 2], dim=2), causal=True), backend)


@pytest.mark.parametrize("head_dim", DIMS)
def test_sequence_first(head_dim: int, backend: str) -> None:
    q, k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in make(head_dim=head_dim))
    check(Call(q, k, v, causal=True), backend)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "sequence", "heads"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_expanded(which: int, dim: int, backend: str) -> None:
    tensors = list(make())
    tensors[which] = tensors[which].narrow(dim, 0, 1).expand_as(tensors[which])
    check(Call(*tensors, causal=True), backend)


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_storage_off_16_bytes(offset: int, head_dim: int, backend: str) -> None:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        room = tensor.new_full((tensor.numel() + 16,), torch.nan)
        return room[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)

    q, k, v = (moved(tensor) for tensor in make(head_dim=head_dim))
    assert q.data_ptr() % 16 == 2 * offset
    check(Call(q, k, v, causal=True), backend)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("head_dim", DIMS)
def test_odd_strides(head_dim: int, which: int, backend: str) -> None:
    tensors = list(make(head_dim=head_dim, dtype=torch.half))
    batch, length, heads, _ = tensors[which].shape
    room = torch.full((batch, length, heads, head_dim + 1), torch.nan, device="cuda").half()
    tensors[which] = room[..., 1:].copy_(tensors[which])
    check(Call(*tensors), backend)


@pytest.mark.parametrize("scale", [0.0, -0.2, 1.7, 1e-6])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scales(scale: float, causal: bool, backend: str) -> None:
    check(Call(*make(), causal, scale), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("logit", [-120.0, 120.0, 1e4], ids=str)
@pytest.mark.parametrize("seqlen_k", [65, 200, 256])
def test_extreme_logits(seqlen_k: int, logit: float, dtype: torch.dtype, backend: str) -> None:
    q, k, v = make(seqlen_k=seqlen_k, dtype=dtype)
    q, k = q * 0.01, k * 0.01
    q[..., 0], k[..., 0] = 1.0, logit
    check(Call(q, with_nan_around(k), with_nan_around(v), scale=1.0), backend)
    check(Call(q, with_nan_around(k), with_nan_around(v), scale=1.0, causal=True), backend)


def test_identical_rows(backend: str) -> None:
    q, k, v = make()
    check(Call(q[:, :1].expand_as(q), k[:, :1].expand_as(k), v), backend)


@pytest.mark.parametrize("lengths", [(200, 1), (300, 100), (129, 128), (1000, 65)], ids=str)
def test_rows_that_see_nothing(lengths: tuple[int, int], backend: str) -> None:
    out, lse = attend(Call(*make(*lengths), causal=True), backend)
    blind = lengths[0] - lengths[1]
    assert (out[:, :blind] == 0).all()
    assert (lse[..., :blind] == -torch.inf).all()
    assert lse[..., blind:].isfinite().all()


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)]
)
def test_empty(batch: int, seqlen_q: int, seqlen_k: int, backend: str) -> None:
    q, k, v = make(seqlen_q, seqlen_k, batch=batch)
    out, lse = attend(Call(q, k, v), backend)
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, seqlen_q)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", DIMS)
def test_nothing_is_written_outside(head_dim: int, causal: bool, backend: str) -> None:
    tensors = make(seqlen_q=77, head_dim=head_dim)
    skip_unless_compiled(backend, torch.bfloat16, head_dim)
    launch = plan(*tensors, causal, None, "bshd", backend).launch
    assert launch is not None
    guard = 4096

    def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        size = torch.Size(shape).numel()
        room = torch.full((size + 2 * guard,), 7.0, dtype=dtype, device="cuda")
        return room, room[guard : guard + size].view(shape)

    room_out, out = guarded(tuple(tensors[0].shape), torch.bfloat16)
    room_lse, lse = guarded((2, 4, 77), torch.float32)
    launch(*tensors, out, lse)
    for room in (room_out, room_lse):
        assert (room[:guard] == 7).all()
        assert (room[-guard:] == 7).all()
