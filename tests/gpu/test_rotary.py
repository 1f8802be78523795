"""Rotary embeddings of the stand-in for flash_attn on a device: values, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_call import DEVICE

from flashvar.compat.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from flashvar.compat.flash_attn.ops.triton.rotary import apply_rotary
from flashvar.ops.rotary import torch_library as rotary_library

pytestmark = [pytest.mark.usefixtures("seed"), pytest.mark.kernels_of("triton")]
ON_DEVICE = pytest.mark.skipif(DEVICE == "cpu", reason="asks the device's kernel or its allocator")
BOTH = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
POSITIONS = 400


@pytest.fixture(autouse=True)
def the_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device torch's functions do not stand in for it."""

    def refuse(*_: object) -> None:
        raise AssertionError("torch's functions were called in place of the kernel")

    if DEVICE != "cpu":
        monkeypatch.setattr(rotary_library, "formula", refuse)


def made(*sizes: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE, **options).to(dtype)


def tables(pairs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(POSITIONS, pairs, device=DEVICE) * 6.3
    return angles.cos().to(dtype), angles.sin().to(dtype)


def oracle(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, inter: bool
) -> torch.Tensor:
    """[..., heads, head_dim] as complex numbers in float64; positions [...], below 0: none."""
    pairs = cos.shape[1]
    part = x[..., : 2 * pairs].double()
    both = part.unflatten(-1, (pairs, 2)) if inter else part.unflatten(-1, (2, pairs)).mT
    factors = torch.complex(cos.double(), sin.double())[positions.clamp(min=0)]
    result = torch.view_as_real(torch.view_as_complex(both.contiguous()) * factors[..., None, :])
    result = (result if inter else result.mT).flatten(-2)
    result = torch.where((positions < 0)[..., None, None], part, result)
    return torch.cat((result, x[..., 2 * pairs :].double()), -1)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Half a step of the dtype, and what float32 sums of two lose."""
    half = 0.5 * torch.finfo(found.dtype).eps
    error = (found.double() - expected).abs()
    assert (error <= 1.02 * half * expected.abs() + 2e-6).all(), error.max()


def positions_of(offsets: Any, batch: int = 3, seqlen: int = 130) -> torch.Tensor:
    rows = torch.arange(seqlen, device=DEVICE)
    if isinstance(offsets, int):
        return (rows + offsets).expand(batch, -1)
    return rows + offsets[:, None]


def starts(*numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE, dtype=dtype)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("table", ["same", "float32"])
@pytest.mark.parametrize(
    ("head_dim", "pairs"), [(128, 64), (128, 32), (64, 32), (80, 12), (256, 128), (96, 1), (72, 36)]
)
def test_values(
    head_dim: int, pairs: int, table: str, dtype: torch.dtype, interleaved: bool
) -> None:
    cos, sin = tables(pairs, dtype if table == "same" else torch.float32)
    x = made(3, 130, 5, head_dim, dtype=dtype)
    for offsets in (0, 7, starts(0, 270, 3), starts(1, 2, 3, dtype=torch.int64)):
        expected = oracle(x, cos, sin, positions_of(offsets), interleaved)
        assert_rounded(apply_rotary(x, cos, sin, offsets, interleaved=interleaved), expected)
        given = x.clone()
        found = apply_rotary(given, cos, sin, offsets, interleaved=interleaved, inplace=True)
        assert found is given
        assert_rounded(found, expected)
    back = apply_rotary(x, cos, sin, 7, interleaved=interleaved, conjugate=True)
    assert_rounded(back, oracle(x, cos, -sin, positions_of(7), interleaved))


@BOTH
@pytest.mark.parametrize("lengths", [(130,), (1, 0, 300, 17, 0, 2), (1,) * 100], ids=len)
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_packed(inplace: bool, lengths: tuple[int, ...], interleaved: bool) -> None:
    cos, sin = tables(24, torch.bfloat16)
    edges = [3, *lengths, 4]
    cu = starts(*edges[:-1]).cumsum(0, dtype=torch.int32)
    offsets = torch.randint(0, 100, (len(lengths),), device=DEVICE, dtype=torch.int32)
    rows = [torch.arange(n, device=DEVICE) + o for n, o in zip(lengths, offsets, strict=True)]
    none = torch.full((1,), -1, device=DEVICE)
    positions = torch.cat((none.expand(3), *rows, none.expand(4)))
    x = made(sum(edges), 6, 64)
    expected = oracle(x, cos, sin, positions, interleaved)
    given = x.clone()
    found = apply_rotary_emb(
        given, cos, sin, interleaved, inplace, offsets, cu, max_seqlen=max(lengths)
    )
    assert_rounded(found, expected)
    assert torch.equal(found[:3], x[:3])
    assert torch.equal(found[-4:], x[-4:])


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "heads first": lambda: made(3, 5, 130, 64).transpose(1, 2),
    "part of qkv": lambda: made(3, 130, 3, 5, 64)[:, :, 1],
    "every second": lambda: made(3, 130, 5, 128)[..., ::2],
    "odd rows": lambda: made(3, 130, 5, 67)[..., 1:65],
    "odd start": lambda: made(3 * 130 * 5 * 64 + 1)[1:].view(3, 130, 5, 64),
}


@BOTH
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, inplace: bool, interleaved: bool) -> None:
    cos, sin = tables(32, torch.bfloat16)
    cos, sin = (torch.stack((one, one), -1).flatten(-2)[:, ::2] for one in (cos, sin))
    x = LAYOUTS[layout]()
    expected = oracle(x, cos, sin, positions_of(0), interleaved)
    assert_rounded(apply_rotary_emb(x, cos, sin, interleaved, inplace), expected)


@ON_DEVICE
def test_nothing_around_is_written_to() -> None:
    cos, sin = tables(32, torch.bfloat16)
    whole = torch.full((3, 132, 7, 68), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    x = whole[:, 1:-1, 1:-1, 2:-2]
    x.copy_(made(3, 130, 5, 64))
    apply_rotary_emb(x, cos, sin, inplace=True)
    assert not x.isnan().any()
    x.fill_(torch.nan)
    assert whole.isnan().all()


@ON_DEVICE
def test_strides_of_more_than_32_bits() -> None:
    cos, sin = tables(32, torch.bfloat16)
    rows, step = 5, 2**30 + 8
    whole = torch.zeros(rows * step, device=DEVICE, dtype=torch.bfloat16)
    for shape, strides in (
        ((rows, 1, 1, 64), (step, 64, 64, 1)),
        ((1, rows, 1, 64), (64, step, 64, 1)),
        ((1, 1, rows, 64), (64, 64, step, 1)),
    ):
        x = whole.as_strided(shape, strides)
        x.copy_(made(*shape))
        positions = torch.arange(shape[1], device=DEVICE).expand(shape[:2])
        expected = oracle(x, cos, sin, positions, False)
        assert_rounded(apply_rotary_emb(x, cos, sin, inplace=True), expected)


@ON_DEVICE
def test_rows_beyond_the_tables_that_the_device_alone_knows_stay() -> None:
    cos, sin = tables(32, torch.bfloat16)
    x = made(3, 130, 5, 64)
    offsets = starts(POSITIONS - 100, -1, 2**31 - 200)
    positions = positions_of(offsets.long())
    positions = torch.where(positions < POSITIONS, positions, -1)
    found = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
    assert_rounded(found, oracle(x, cos, sin, positions, False))
    assert torch.equal(found[2], x[2])


@BOTH
def test_gradients(interleaved: bool) -> None:
    cos, sin = tables(24, torch.bfloat16)
    qkv = made(3, 130, 3, 5, 64).requires_grad_()
    positions = positions_of(2)
    grad = made(*qkv.shape)
    given = grad.clone()
    out = apply_rotary_emb_qkv_(qkv * 1, cos, sin, interleaved=interleaved, seqlen_offsets=2)
    (found,) = torch.autograd.grad(out, qkv, given)
    assert torch.equal(given, grad)
    for i in range(2):
        assert_rounded(out[:, :, i], oracle(qkv[:, :, i], cos, sin, positions, interleaved))
        assert_rounded(found[:, :, i], oracle(grad[:, :, i], cos, -sin, positions, interleaved))
    assert torch.equal(out[:, :, 2], qkv[:, :, 2])
    assert torch.equal(found[:, :, 2], grad[:, :, 2])
    grouped = qkv.detach().flatten(2, 3)[:, :, :14].clone().requires_grad_()
    out = apply_rotary_emb_qkv_(grouped * 1, cos, sin, sin, cos, interleaved, 2, num_heads_q=8)
    (found,) = torch.autograd.grad(out, grouped, grad.flatten(2, 3)[:, :, :14])
    grads = grad.flatten(2, 3)
    assert_rounded(found[:, :, :8], oracle(grads[:, :, :8], cos, -sin, positions, interleaved))
    expected = oracle(grads[:, :, 8:11], sin, -cos, positions, interleaved)
    assert_rounded(found[:, :, 8:11], expected)
    assert torch.equal(found[:, :, 11:], grads[:, :, 11:14])


def test_an_expanded_gradient() -> None:
    cos, sin = tables(32, torch.bfloat16)
    x = made(3, 130, 5, 64).requires_grad_()
    apply_rotary_emb(x, cos, sin).sum().backward()
    assert x.grad is not None
    ones = torch.ones_like(x)
    assert_rounded(x.grad, oracle(ones, cos, -sin, positions_of(0), False))


def test_who_kept_x_for_its_backward_is_told() -> None:
    """A kernel writes behind autograd's back, unless it is told."""
    cos, sin = tables(32, torch.bfloat16)
    y = made(3, 130, 5, 64).requires_grad_().exp()
    out = apply_rotary_emb(y, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("form", ["new", "inplace", "qkv", "kv"])
def test_compiled(form: str) -> None:
    torch._dynamo.reset()
    cos, sin = tables(32, torch.bfloat16)

    def function(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if form == "qkv":
            out = apply_rotary_emb_qkv_(x * 2, cos, sin, seqlen_offsets=offsets, num_heads_q=2)
        elif form == "kv":
            out = apply_rotary_emb_kv_((x * 2).unflatten(2, (2, 3)), cos, sin, False, offsets)
        else:
            out = apply_rotary_emb(x * 2, cos, sin, False, form == "inplace", offsets)
        return out * 3

    x, offsets = made(3, 130, 6, 64), starts(1, 5, 270)
    results = []
    for call in (function, torch.compile(function, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out = call(leaf, offsets)
        results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), leaf)))
    torch.testing.assert_close(results[1], results[0])


@ON_DEVICE
def test_a_graph_is_replayed() -> None:
    cos, sin = tables(32, torch.bfloat16)
    x, offsets = made(3, 1, 5, 64), starts(0, 1, 2)
    apply_rotary_emb(x.clone(), cos, sin, seqlen_offsets=offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
    x.copy_(made(3, 1, 5, 64))
    offsets.copy_(starts(300, 20, 1))
    graph.replay()
    assert_rounded(out, oracle(x, cos, sin, offsets.long()[:, None], False))


@ON_DEVICE
def test_in_place_takes_no_memory_and_few_kernels_are_compiled() -> None:
    from flashvar.backends.triton.rotary.kernel import rotary_kernel

    cos, sin = tables(64, torch.bfloat16)
    device = torch.cuda.current_device()
    rotary_kernel.device_caches.clear()
    for batch, seqlen in ((1, 1), (2, 128), (4, 256), (3, 130), (1, 399)):
        x = made(batch, seqlen, 8, 128)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        apply_rotary_emb(x, cos, sin, inplace=True)
        assert torch.cuda.max_memory_allocated() == before
    assert len(rotary_kernel.device_caches[device][0]) <= 2


def test_the_module_generates() -> None:
    module = RotaryEmbedding(64, device=DEVICE)
    qkv = made(2, 40, 3, 4, 64)
    expected = module(qkv.clone())
    parts = [module(qkv[:, :30].clone())]
    for row in range(30, 40):
        offsets = starts(row, row)
        part = module(qkv[:, row : row + 1].clone(), seqlen_offset=offsets, max_seqlen=40)
        parts.append(part)
    assert torch.equal(torch.cat(parts, 1), expected)
