"""A bias of every alignment, stride and content, with and without its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, check, check_gradients, differentiate
from features import bias, dense, rng_state, slopes
from oracle import Call, assert_gradients_right

DIMS = pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256], ids=lambda d: f"d{d}")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
STORED = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["16-bit", "fp32"]
)  # of the bias


def biased(
    head_dim: int, values: torch.Tensor, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Call:
    """A call of four heads whose lengths are those of the bias."""
    lengths = (values.shape[2], values.shape[3])
    return dense(head_dim, dtype, lengths, bias=values, **options)


def check_both(call: Call, backend: str, *, deterministic: bool = False) -> None:
    """The output, and the gradients with and without that of the bias."""
    check(call, backend)
    check_gradients(call, backend, deterministic=deterministic)
    grad_out = torch.randn(call.out_shape, device=DEVICE).to(call.q.dtype)
    found = differentiate(
        call, backend, grad_out, deterministic=deterministic, wanted=("q", "k", "v")
    )
    assert set(found) == {"q", "k", "v"}
    assert_gradients_right(call, found, grad_out)


# Rows on 16, 8, 4 and, of 16-bit elements, 2 bytes; several tiles, and less than one.
@MASKS
@DIMS
@STORED
@pytest.mark.parametrize(
    "lengths", [(200, 392), (150, 268), (131, 262), (129, 257), (17, 9), (1, 1)], ids=str
)
def test_rows_of_any_length(
    lengths: tuple[int, int], dtype: torch.dtype, head_dim: int, causal: bool, backend: str
) -> None:
    check_both(biased(head_dim, bias(2, 4, dtype, lengths), causal=causal), backend)


@DIMS
@STORED
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 7])
def test_storage_of_any_alignment(
    offset: int, dtype: torch.dtype, head_dim: int, backend: str
) -> None:
    """NaN in front of the tensor, behind it and between its rows."""
    room = torch.full((2, 4, 150, 288), torch.nan, dtype=dtype, device=DEVICE)
    values = room[..., offset : offset + 270].copy_(bias(2, 4, dtype))
    check_both(biased(head_dim, values), backend)


@MASKS
@STORED
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_expanded(
    dims: tuple[int, ...], head_dim: int, dtype: torch.dtype, causal: bool, backend: str
) -> None:
    shape = [1 if dim in dims else size for dim, size in enumerate((2, 4, 200, 392))]
    values = torch.randn(shape, device=DEVICE).to(dtype).expand(2, 4, 200, 392)
    check_both(biased(head_dim, values, causal=causal), backend)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (2, 1, 0, 3), (0, 2, 1, 3)], ids=str)
def test_strides_in_another_order(order: tuple[int, ...], backend: str) -> None:
    stored = torch.empty([(2, 4, 200, 392)[dim] for dim in order], device=DEVICE)
    values = stored.permute(order).copy_(bias(2, 4, torch.float32, (200, 392)))
    check_both(biased(64, values), backend)


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "window": {"window": (70, 20)},
    "window-causal": {"window": (90, -1), "causal": True},
    "more-queries": {"causal": True, "lengths": (392, 200)},
    "negative-scale": {"scale": -0.3},
    "one-head": {"heads": (1, 1)},
    "one-key-head": {"heads": (4, 1), "causal": True},
    "values": {"head_dim_v": 96},
}


def with_options(kind: str, head_dim: int, dtype: torch.dtype) -> Call:
    named = dict(OPTIONS[kind])
    heads = named.get("heads", (4, 2))[0]
    values = bias(2, heads, dtype, named.pop("lengths", (200, 392)))
    return biased(head_dim, values, **named)


@STORED
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_with(
    kind: str, deterministic: bool, head_dim: int, dtype: torch.dtype, backend: str
) -> None:
    check_both(with_options(kind, head_dim, dtype), backend, deterministic=deterministic)


@STORED
@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("which", ["alibi", "dropout", "all"])
def test_beside(
    which: str, deterministic: bool, head_dim: int, dtype: torch.dtype, backend: str
) -> None:
    """ALiBi, dropout, and both with softcap under a causal mask."""
    alibi = {"alibi_slopes": slopes(4)}
    dropout = {"dropout_p": 0.25, "rng_state": rng_state()}
    options: dict[str, Any] = {
        "alibi": alibi,
        "dropout": dropout,
        "all": {**alibi, **dropout, "softcap": 5.0, "causal": True},
    }[which]
    call = biased(head_dim, bias(2, 4, dtype, (200, 392)), **options)
    check_both(call, backend, deterministic=deterministic)


# Which elements are -inf, as slices of a bias of [2, 4, 200, 392].
HIDDEN: dict[str, tuple[Any, ...]] = {
    "some-keys": (..., slice(3, 9)),
    "a-tile": (slice(None), slice(None), slice(64, 128), slice(128, 256)),
    "rows": (0, slice(None), slice(60, 75)),
    "all-but-one-key": (..., slice(1, None)),
    "a-head": (1, 2),
    "everything": (...,),
}


@STORED
@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("kind", HIDDEN)
def test_infinite_elements(
    kind: str, head_dim: int, causal: bool, dtype: torch.dtype, backend: str
) -> None:
    values = bias(2, 4, dtype, (200, 392))
    values[HIDDEN[kind]] = -torch.inf
    check_both(biased(head_dim, values, causal=causal), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min], ids=str)
def test_masks_of_finite_numbers(
    lowest: float, head_dim: int, dtype: torch.dtype, backend: str
) -> None:
    """Causal: kernels process blocks of hidden keys alone before those that a query sees."""
    values = bias(2, 4, torch.float32, (200, 392))
    hidden = torch.ones(200, 392, dtype=torch.bool, device=DEVICE).triu(1)
    check_both(biased(head_dim, values.masked_fill_(hidden, lowest), dtype), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
def test_long(head_dim: int, dtype: torch.dtype, backend: str) -> None:
    """More tiles than blocks, each of several steps."""
    values = bias(1, 16, dtype, (1100, 1104))
    check_both(biased(head_dim, values, dtype, heads=(16, 4), causal=True), backend)


@STORED
@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
def test_a_deterministic_gradient_repeats(head_dim: int, dtype: torch.dtype, backend: str) -> None:
    """Of a bias that is not broadcast, and of the others beside it."""
    call = biased(head_dim, bias(2, 4, dtype, (777, 784)), causal=True)
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()
    first = differentiate(call, backend, grad_out, deterministic=True)
    for _ in range(10):
        again = differentiate(call, backend, grad_out, deterministic=True)
        assert all(torch.equal(again[name], grad) for name, grad in first.items())
