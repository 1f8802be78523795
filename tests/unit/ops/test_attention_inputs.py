"""Bad calls end in an exception that says what was expected and what was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashvar
from flashvar.errors import (
    BackendUnavailableError,
    DeviceError,
    DtypeError,
    InvalidInputError,
    LayoutError,
    ShapeError,
)
from flashvar.ops.attention import validate as attention_inputs
from flashvar.ops.attention.problem import Inputs, Options, Problem, Strides

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(dtype: torch.dtype = torch.float32, device: str = "cpu", head_dim: int = 16) -> Tensors:
    """q, k and v with 4 query heads on 2 key heads."""
    q = torch.empty(2, 5, 4, head_dim, dtype=dtype, device=device)
    k = torch.empty(2, 7, 2, head_dim, dtype=dtype, device=device)
    return q, k, k.clone()


def inspect(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Problem:
    return attention_inputs.inspect(Inputs(q, k, v), Options(**options))


def replaced(which: str, change: Callable[[torch.Tensor], object]) -> dict[str, object]:
    named: dict[str, object] = dict(zip("qkv", tensors(), strict=True))
    value = named[which]
    assert isinstance(value, torch.Tensor)
    return {**named, which: change(value)}


BAD = {
    "rank": (replaced("q", lambda t: t[0]), ShapeError, r"4 dimensions.*found 3"),
    "batch": (replaced("q", lambda t: t[:1]), ShapeError, r"same batch size, found 1 in q and 2"),
    "k and v differ": (replaced("v", lambda t: t[:, :6]), ShapeError, r"\(2, 7, 2, 16\) and v \("),
    "heads do not divide": (replaced("q", lambda t: t[:, :, :3]), ShapeError, r"found 3 and 2"),
    "no heads": (replaced("q", lambda t: t[:, :, :0]), ShapeError, r"positive multiple.*found 0"),
    "head dims differ": (replaced("q", lambda t: t[..., :8]), ShapeError, r"found 8 in q and 16"),
    "dtypes differ": (replaced("k", lambda t: t.half()), DtypeError, r"one dtype, found .*float16"),
    "devices differ": (
        replaced("k", lambda t: t.to("meta")),
        DeviceError,
        r"one device.*k on meta",
    ),
    "last dim strided": (
        replaced("q", lambda t: t.repeat(1, 1, 1, 2)[..., ::2]),
        LayoutError,
        r"q must be contiguous in its last dimension.*\(640, 128, 32, 2\)",
    ),
    "not a tensor": (replaced("v", lambda t: t.numpy()), InvalidInputError, r"found ndarray"),
}


@pytest.mark.parametrize(
    ("arguments", "error", "words"), BAD.values(), ids=[name.replace(" ", "-") for name in BAD]
)
def test_bad_tensors(
    arguments: dict[str, torch.Tensor], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        flashvar.attention(**arguments)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_bad_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=f"bfloat16 or float16.*{dtype}"):
        flashvar.attention(*tensors(dtype))


def test_head_dim_zero() -> None:
    with pytest.raises(ShapeError, match="head dim must be at least 1, found 0"):
        flashvar.attention(*tensors(head_dim=0))


@pytest.mark.parametrize(
    "scale", [float("nan"), float("inf"), -float("inf"), 1e39, 10**400, "1", [1.0], 1j], ids=repr
)
def test_bad_scale(scale: float) -> None:
    with pytest.raises(InvalidInputError, match=r"scale must be a.* number.*, found"):
        flashvar.attention(*tensors(), scale=scale)


@pytest.mark.parametrize("causal", [1, "no", None, torch.tensor(True), [True]], ids=repr)
def test_causal_is_a_bool(causal: bool) -> None:
    with pytest.raises(InvalidInputError, match="causal must be True or False, found"):
        flashvar.attention(*tensors(), causal=causal)


@pytest.mark.parametrize(
    "option", [{"layout": ["bshd"]}, {"backend": ["auto"]}, {"layout": None}], ids=repr
)
def test_options_that_are_no_words(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="must be one of"):
        flashvar.attention(*tensors(), **option)


def nested() -> torch.Tensor:
    parts = [torch.randn(3, 2, 8), torch.randn(2, 2, 8)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(nested, id="nested"),
        pytest.param(lambda: torch.randn(2, 3, 2, 8).to_sparse(), id="sparse"),
    ],
)
def test_tensors_that_are_not_strided(odd: Callable[[], torch.Tensor]) -> None:
    tensor = odd()
    with pytest.raises(LayoutError, match="q must be a strided tensor, found"):
        flashvar.attention(tensor, tensor, tensor)


def test_strides_of_single_entries_do_not_count() -> None:
    q = torch.empty(1, 4, 1, 8).as_strided((1, 4, 1, 8), (33, 8, 7, 1))
    problem = inspect(q, q, q)
    assert tuple(problem.q) == (0, 8, 0)


def test_unknown_layout() -> None:
    with pytest.raises(LayoutError, match="'bshd', 'bhsd', 'bhsd->bshd', found 'sbhd'"):
        flashvar.attention(*tensors(), layout="sbhd")  # type: ignore[call-overload]


def test_unknown_backend() -> None:
    with pytest.raises(InvalidInputError, match=r"one of 'auto', 'cuda'.*found 'cudnn'"):
        flashvar.attention(*tensors(), backend="cudnn")  # type: ignore[call-overload]


def test_named_backend_that_cannot_serve() -> None:
    with pytest.raises(BackendUnavailableError, match="backend 'cuda'"):
        flashvar.attention(*tensors(), backend="cuda")


def test_gradients_do_not_hide_the_words() -> None:
    q, k, v = tensors()
    with pytest.raises(ShapeError, match="found 3 and 2"):
        flashvar.attention(q[:, :, :3].requires_grad_(), k, v)


class _OnCuda(torch.Tensor):
    """Claims to be on a CUDA device, so that its rules are tested without one."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


def on_cuda(dtype: torch.dtype, head_dim: int) -> Tensors:
    q, k, v = (tensor.as_subclass(_OnCuda) for tensor in tensors(dtype, head_dim=head_dim))
    return q, k, v


@pytest.mark.parametrize("head_dim", [513, 520])
def test_head_dims_that_no_kernel_takes(head_dim: int) -> None:
    with pytest.raises(ShapeError, match=f"from 1 to 512 on a CUDA device, found {head_dim}"):
        inspect(*on_cuda(torch.half, head_dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_that_no_kernel_takes(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=f"on a CUDA device, found {dtype}"):
        inspect(*on_cuda(dtype, 16))


def test_the_reference_takes_them_on_cuda() -> None:
    q, k, v = on_cuda(torch.float64, 12)
    problem = inspect(q, k, v, backend="reference")
    assert (problem.device, problem.dtype, problem.head_dim) == (1, "fp64", 12)


def test_layouts_describe_the_same_call() -> None:
    q, k, v = tensors()
    given = inspect(q, k, v, causal=True, scale=2, layout="bshd")
    views = inspect(*(t.transpose(1, 2) for t in (q, k, v)), causal=True, scale=2, layout="bhsd")
    assert (given.q, given.k, given.v) == (views.q, views.k, views.v)
    assert given.out == Strides(5 * 4 * 16, 4 * 16, 16)
    assert views.out == Strides(4 * 5 * 16, 16, 5 * 16)
    assert (given.out_shape, views.out_shape) == ((2, 5, 4, 16), (2, 4, 5, 16))
    assert given.scale == 2.0
    turned = inspect(*(t.transpose(1, 2) for t in (q, k, v)), scale=2, layout="bhsd->bshd")
    assert (turned.q, turned.out, turned.out_shape) == (given.q, given.out, given.out_shape)


def test_one_element_needs_no_stride() -> None:
    q = torch.empty(1, 1, 1, 2)[..., ::2]
    assert inspect(q, q, q).head_dim == 1
