"""Graphs of sizes that depend on values: torch.compile knows none of them while it traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked

import flashvar
from flashvar import flash_attn
from flashvar.compat.flash_attn.bert_padding import pad_input, unpad_input
from flashvar.compat.flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flashvar.errors import ShapeError
from flashvar.integrations.xformers import memory_efficient_attention
from flashvar.layers import RMSNorm, rms_norm_gated

BATCH, ROWS, HEADS, HEAD_DIM = 3, 6, 2, 4
NEEDS_NEWER = pytest.mark.skipif(
    torch.__version__.startswith("2.8."),
    reason=f"torch {torch.__version__} compares, indexes and broadcasts no unknown sizes",
)
NORM = RMSNorm(HEAD_DIM, dtype=torch.float64)
LENGTHS = torch.tensor([3, 1, 6], dtype=torch.int32)


def made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def attention(q: Any, k: Any, v: Any, bias: Any, slopes: Any) -> Any:
    rows = {"causal": True, "window_size": (3, 0)}
    return flashvar.attention(q, k, v, bias=bias, alibi_slopes=slopes, **rows)


@torch.no_grad()
def with_cache(q: Any, k: Any, v: Any, cache: Any) -> Any:
    return flash_attn.flash_attn_with_kvcache(
        q, cache.clone(), cache.clone(), k, v, cache_seqlens=LENGTHS, causal=True
    )


def merged(a: Any, b: Any, c: Any, d: Any) -> Any:
    return flashvar.merge_states([a, b], [c, d])[0]


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    return apply_rotary_emb(x * 1, cos, sin, inplace=True)


def normalized(x: Any, residual: Any) -> Any:
    return NORM(x, residual=residual)


def gated(x: Any, gate: Any) -> Any:
    return rms_norm_gated(x, gate, None, None)


def recurrent(q: Any, k: Any, v: Any, beta: Any) -> Any:
    state = q.new_zeros(q.shape[0], HEADS, HEAD_DIM, HEAD_DIM)
    return flashvar.gated_delta_rule(q, k, v, None, beta, initial_state=state)[0]


def convolved(x: Any, weight: Any, state: Any) -> Any:
    return flashvar.causal_conv1d(x, weight, residual=x * 2, initial_state=state)


def of_packed(x: Any, weight: Any, names: Any) -> Any:
    packed = flashvar.causal_conv1d(x[:1], weight, cu_seqlens=torch.tensor([0, 2, ROWS]))
    return flashvar.causal_conv1d(x, weight, seq_idx=names) + packed.sum()


def rows() -> torch.Tensor:
    return made(BATCH, ROWS, HEADS, HEAD_DIM)


def table() -> torch.Tensor:
    return torch.rand(16, HEAD_DIM // 2, dtype=torch.float64)


def lse() -> torch.Tensor:
    return made(BATCH, HEADS, ROWS)


# The tensors of a call, and which of their dimensions are unknown.
Case = tuple[Callable[..., Any], list[tuple[torch.Tensor, tuple[int, ...]]]]


def cases() -> Iterator[Any]:
    slopes = torch.rand(BATCH, HEADS)
    bias = made(BATCH, 1, ROWS, ROWS)
    cache = made(BATCH, 16, HEADS, HEAD_DIM)
    x, weight = made(BATCH, ROWS, HEADS), made(HEADS, 3)
    names = torch.arange(ROWS).div(4, rounding_mode="floor").expand(BATCH, ROWS)
    for name, *case in (
        ("attention", attention, *[(rows(), (0, 1))] * 3, (bias, (0, 2, 3)), (slopes, (0,))),
        ("flash_attn", flash_attn.flash_attn_func, *[(rows(), (0, 1))] * 3),
        ("kv_cache", with_cache, *[(rows(), (0, 1))] * 3, (cache, (0, 1))),
        ("merge_states", merged, *[(rows(), (0, 1))] * 2, *[(lse(), (0, 2))] * 2),
        ("rotary", rotated, (rows(), (0, 1)), *[(table(), (0,))] * 2),
        ("rms_norm", normalized, *[(rows(), (0, 1))] * 2),
        ("rms_norm_gated", gated, *[(rows(), (0, 1))] * 2),
        ("rms_norm_gated rows", gated, (rows(), (0, 1)), (rows().flatten(0, 2), (0,))),
        ("gated_delta_rule", recurrent, *[(rows(), (0, 1))] * 3, (made(BATCH, ROWS, HEADS), (0,))),
        ("causal_conv1d", convolved, (x, (0, 1)), (weight, ()), (made(BATCH, HEADS, 2), (0,))),
        ("seq_idx", of_packed, (x, (0, 1)), (weight, ()), (names, (0, 1))),
        ("xformers", memory_efficient_attention, *[(rows(), (0, 1))] * 3),
    ):
        marks = NEEDS_NEWER if name in ("kv_cache", "rotary", "seq_idx") else ()
        yield pytest.param(case[0], case[1:], id=name, marks=marks)


def compiled(function: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(("function", "given"), list(cases()))
def test_unknown_sizes(function: Callable[..., Any], given: list[Any]) -> None:
    tensors = [x.clone().requires_grad_(x.dtype == torch.float64) for x, _ in given]
    marked = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    for x, (_, dims) in zip(marked, given, strict=True):
        for dim in dims:
            mark_unbacked(x, dim)
    expected, found = function(*tensors), compiled(function)(*marked)
    torch.testing.assert_close(found, expected)
    if not expected.requires_grad:
        return
    expected.square().sum().backward()
    found.square().sum().backward()
    for x, y in zip(marked, tensors, strict=True):
        assert (x.grad is None) is (y.grad is None)
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad)


def packed_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows, indices, ends, longest, _ = unpad_input(x, mask)
    out = flash_attn.flash_attn_varlen_func(
        rows, rows, rows, ends, ends, longest, longest, causal=True
    )
    return pad_input(out, indices, *x.shape[:2])


def in_pages(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows, indices, ends, longest, used = unpad_input(x, mask)
    pages = torch.arange(BATCH, dtype=torch.int32)[:, None]
    out = flash_attn.flash_attn_varlen_func(
        rows, x, x, ends, ends, longest, longest, block_table=pages
    )
    out = out + flash_attn.flash_attn_with_kvcache(
        rows[None], x[:1], x[:1], cache_seqlens=used[0].item(), causal=True
    ).squeeze(0)
    return pad_input(out, indices, *x.shape[:2])


@pytest.mark.parametrize("function", [packed_rows, pytest.param(in_pages, marks=NEEDS_NEWER)])
def test_rows_that_a_mask_selects(function: Callable[..., Any]) -> None:
    x, masks = rows(), torch.rand(2, BATCH, ROWS) < 0.5
    masks[:, :, 0] = True
    config = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(**config):
        found = compiled(function)
        for mask in masks:
            torch.testing.assert_close(found(x, mask), function(x, mask))


@NEEDS_NEWER
@pytest.mark.parametrize("positions", [ROWS // 2, 2 * ROWS])
def test_tables_of_an_eager_call(positions: int) -> None:
    """Whether they have all positions is unknown: the graph makes its own."""
    x, layer = made(BATCH, ROWS, 3, HEADS, HEAD_DIM), RotaryEmbedding(HEAD_DIM)
    wanted = layer(x.clone())
    layer = RotaryEmbedding(HEAD_DIM)
    layer(x.repeat(1, 2, 1, 1, 1)[:, :positions].clone())
    marked = x.clone()
    mark_unbacked(marked, 1)
    torch.testing.assert_close(compiled(lambda qkv: layer(qkv * 1))(marked), wanted)
    torch.testing.assert_close(layer(x.clone()), wanted)


def test_a_graph_checks_its_sizes_when_it_runs() -> None:
    tables = [table()[:ROWS] for _ in range(2)]
    x = rows().repeat(1, 2, 1, 1)
    mark_unbacked(x, 1)
    with pytest.raises(ShapeError, match="cos and sin must have 12 positions"):
        compiled(rotated)(x, *tables)
    q, k = rows(), made(BATCH + 1, ROWS, HEADS, HEAD_DIM)
    mark_unbacked(q, 0)
    mark_unbacked(k, 0)
    with pytest.raises(ShapeError, match="must have the same batch size, found 3 in q and 4 in k"):
        compiled(flashvar.attention)(q, k, k)
