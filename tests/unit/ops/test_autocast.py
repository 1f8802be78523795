"""Autocast chooses the dtype of the tensors that attention is given, and nothing inside of it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import flashvar
from flashvar.compat.causal_conv1d import causal_conv1d_varlen_states, torch_reference
from flashvar.compat.flash_attn import bert_padding
from flashvar.compat.flash_attn.layers import rotary
from flashvar.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashvar.integrations.torch import flash as torch_flash
from flashvar.layers import GatedDeltaNet

DTYPES = [torch.float16, torch.bfloat16]
RNG = torch.tensor([5, 7])
OFFSETS = torch.tensor([0, 4, 9], dtype=torch.int32)

Outputs = list[torch.Tensor]


def made(*shape: int) -> torch.Tensor:
    """Entries whose products leave the range of float16."""
    return torch.randn(shape).sign() * (20 + 10 * torch.rand(shape))


def dense(*tensors: torch.Tensor, **options: Any) -> Outputs:
    return list(flashvar.attention(*tensors, scale=1e-3, return_lse=True, **options))


def packed(*tensors: torch.Tensor) -> Outputs:
    rows = [tensor.flatten(0, 1)[:9] for tensor in tensors]
    return list(flashvar.attention_varlen(*rows, cu_seqlens_q=OFFSETS, scale=1e-3, return_lse=True))


def mapped(*tensors: torch.Tensor) -> Outputs:
    return list(torch.vmap(dense)(*(tensor.unsqueeze(1) for tensor in tensors)))


def compiled(*tensors: torch.Tensor, **options: Any) -> Outputs:
    torch._dynamo.reset()
    return list(torch.compile(dense, backend="aot_eager", fullgraph=True)(*tensors, **options))


def shown(*tensors: torch.Tensor) -> Outputs:
    """With the dropped weights that FlashAttention 2 shows its tests."""
    torch.manual_seed(3)
    return list(flash_attn_func(*tensors, 0.2, 1e-3, return_attn_probs=True))


CALLS: dict[str, Callable[..., Outputs]] = {
    "plain": dense,
    "causal": lambda *x: dense(*x, causal=True, window_size=(3, 0)),
    "bias": lambda *x: dense(*x, bias=torch.linspace(-9, 9, 300).view(1, 2, 10, 15).to(x[0].dtype)),
    "softcap": lambda *x: dense(*x, softcap=30.0, alibi_slopes=torch.tensor([0.1, 0.3])),
    "sinks": lambda *x: dense(*x, sinks=torch.tensor([0.5, -1.0])),
    "dropout": lambda *x: dense(*x, dropout_p=0.3, rng_state=RNG),
    "heads first": lambda *x: dense(*(t.transpose(1, 2) for t in x), layout="bhsd"),
    "packed": packed,
    "mapped": mapped,
    "compiled": compiled,
    "dropped weights": shown,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_same_bits_as_without(call: Callable[..., Outputs], dtype: torch.dtype) -> None:
    leaves = [made(2, rows, 2, 128).to(dtype).requires_grad_() for rows in (10, 15, 15)]
    expected = call(*leaves)
    grads = [torch.ones_like(out) for out in expected[:2]]
    wanted = torch.autograd.grad(expected[:2], leaves, grads)
    with torch.autocast("cpu", dtype=dtype):
        found = call(*leaves)
    after = torch.autograd.grad(found[:2], leaves, grads, retain_graph=True)
    with torch.autocast("cpu", dtype=dtype):
        during = torch.autograd.grad(found[:2], leaves, grads)
    assert all(out.isfinite().all() for out in expected)
    torch.testing.assert_close((found, after, during), (expected, wanted, wanted), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_backward_of_a_forward_without(dtype: torch.dtype) -> None:
    leaves = [made(1, 7, 2, 128).to(dtype).requires_grad_() for _ in "qkv"]
    out = flashvar.attention(*leaves, scale=1e-3)
    expected = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with torch.autocast("cpu", dtype=dtype):
        found = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def repeated_attention() -> Callable[[], torch.Tensor]:
    tensors = [made(1, 9, 2, 16).requires_grad_() for _ in "qkv"]
    return lambda: flashvar.attention(*tensors)


def repeated_gated_delta_rule() -> Callable[[], torch.Tensor]:
    q, k, v = (torch.randn(1, 9, 2, 16).requires_grad_() for _ in "qkv")
    beta = torch.rand(1, 9, 2)
    return lambda: flashvar.gated_delta_rule(q, k, v, None, beta)[0]


def repeated_causal_conv1d() -> Callable[[], torch.Tensor]:
    x, weight = torch.randn(1, 9, 4), torch.randn(4, 3).requires_grad_()
    return lambda: flashvar.causal_conv1d(x, weight)


@pytest.mark.parametrize(
    ("repeated", "through_dispatcher"),
    [
        (repeated_attention, ["attention.call._dispatched", "attention.call.plan"]),
        (repeated_gated_delta_rule, ["gated_delta_rule.api._checked"]),
        (repeated_causal_conv1d, ["causal_conv1d.api.dispatched", "causal_conv1d.run.plan"]),
    ],
    ids=["attention", "gated_delta_rule", "causal_conv1d"],
)
def test_a_repeated_call_is_known_at_once(
    repeated: Callable[[], Callable[[], torch.Tensor]],
    through_dispatcher: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = repeated()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            expected = call()
        for name in through_dispatcher:
            monkeypatch.setattr(f"flashvar.ops.{name}", None)
        assert call().equal(expected)


def test_calls_follow_the_dtype_of_autocast() -> None:
    call = repeated_attention()
    dtypes = [torch.bfloat16, torch.float16, torch.bfloat16, torch.float16]
    for dtype in dtypes:
        with torch.autocast("cpu", dtype):
            assert call().dtype == dtype
    assert call().dtype == torch.float32


@pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="this torch has no registry of kernels"
)
def test_kernels_of_torchs_own_op() -> None:
    implementation = torch_flash.Implementation("CPU")
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    leaves = [made(1, 2, 7, 128).half().requires_grad_() for _ in "qkv"]
    try:
        out, lse = flash(*leaves, scale=1e-3)[:2]
        expected = torch.autograd.grad(out.sum(), leaves)
        with torch.autocast("cpu", dtype=torch.half):
            again, lse_again = flash(*leaves, scale=1e-3)[:2]
            found = torch.autograd.grad(again.sum(), leaves)
    finally:
        implementation.remove()
    torch.testing.assert_close((again, lse_again, *found), (out, lse, *expected), rtol=0, atol=0)


@pytest.mark.parametrize("call", [dense, compiled])
def test_the_bias_of_float64_is_not_cast(call: Callable[..., Outputs]) -> None:
    tensors = [made(1, 10, 2, 8).double() for _ in range(3)]
    options = {"bias": torch.randn(1, 2, 10, 10)}
    expected = dense(*tensors, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = call(*tensors, **options)
    torch.testing.assert_close(found, expected)


def other_than(dtype: torch.dtype) -> torch.dtype:
    """The other 16-bit dtype, of which torch's cat, stack and index_copy refuse tensors."""
    (other,) = (one for one in DTYPES if one != dtype)
    return other


NAMES = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
ROWS = torch.tensor([4, 0, 7])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotary.apply_rotary_emb(x, cos, sin)


def mapped_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.vmap(rotated, (0, None, None))(x[:, None], cos, sin)


# Shapes of tensors, and a function of them whose result has their dtype.
KEPT: dict[str, tuple[list[tuple[int, ...]], Callable[..., torch.Tensor]]] = {
    "rotation": ([(2, 5, 3, 8), (5, 3), (5, 3)], rotated),
    "mapped rotation": ([(2, 5, 3, 8), (5, 3), (5, 3)], mapped_rotation),
    "rotation in torch": ([(2, 5, 3, 8), (5, 3), (5, 3)], rotary.apply_rotary_emb_torch),
    "half": ([(2, 5, 8)], rotary.rotate_half),
    "interleaved half": ([(2, 5, 8)], lambda x: rotary.rotate_half(x, True)),
    "padded": ([(3, 4)], lambda x: bert_padding.index_put_first_axis(x, ROWS, 8)),
    "named sequences": (
        [(2, 5, 4), (4, 3), (2, 4, 2)],
        lambda x, w, s: flashvar.causal_conv1d(x, w, seq_idx=NAMES, initial_state=s),
    ),
    "last tokens": ([(9, 4)], lambda x: causal_conv1d_varlen_states(x, OFFSETS, 3)),
}


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shapes", "call"), KEPT.values(), ids=KEPT)
def test_other_16_bit_tensors_keep_their_dtype(
    shapes: list[tuple[int, ...]],
    call: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    records: bool,
) -> None:
    other = other_than(dtype)
    tensors = [torch.randn(shape).to(other).requires_grad_(records) for shape in shapes]
    expected = call(*tensors)
    with torch.autocast("cpu", dtype):
        found = call(*tensors)
    assert found.dtype == other
    assert torch.equal(found, expected)
    if records:
        one = torch.ones_like(expected)
        grads = [torch.autograd.grad(out, tensors, one) for out in (found, expected)]
        torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_references_of_other_16_bit_tensors(dtype: torch.dtype) -> None:
    other = other_than(dtype)
    shapes = (2, 4, 9), (2, 4, 3), (4, 3)
    x, state, weight = (torch.randn(shape).to(other) for shape in shapes)
    positions = torch.tensor([1, 4], dtype=torch.int32)
    with torch.autocast("cpu", dtype):
        y = torch_reference.causal_conv1d_ref(x, weight)
        states = [state.clone(), state.clone()]
        found = [
            torch_reference.causal_conv1d_update_ref(x, one, weight, cache_seqlens=at)
            for one, at in zip(states, (None, positions), strict=True)
        ]
    assert {one.dtype for one in (y, *found, *states)} == {other}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_of_another_16_bit_dtype(dtype: torch.dtype) -> None:
    layer = GatedDeltaNet(16, head_dim=8, num_heads=2, conv_bias=True).to(other_than(dtype))
    x = torch.randn(2, 40, 16)
    wide = deepcopy(layer).float()
    with torch.autocast("cpu", dtype):
        found, expected = layer(x)[0], wide(x)[0]
        in_graph = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)[0]
    assert found.dtype == in_graph.dtype == dtype
    torch.testing.assert_close((found, in_graph), (expected, expected))


def dropped(q: torch.Tensor) -> Outputs:
    torch.manual_seed(3)
    return list(flash_attn_func(q, q, q, 0.2, return_attn_probs=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ((2, 5, 3, 2, 8), flash_attn_qkvpacked_func),
        ((2, 5, 2, 2, 8), lambda kv: flash_attn_kvpacked_func(kv[:, :, 0], kv)),
        ((9, 3, 2, 8), lambda qkv: flash_attn_varlen_qkvpacked_func(qkv, OFFSETS, 5)),
        ((2, 5, 2, 8), dropped),
    ],
    ids=["qkv", "kv", "packed qkv", "dropped weights"],
)
def test_attention_is_in_the_dtype_of_autocast(
    shape: tuple[int, ...], call: Callable[..., Any], dtype: torch.dtype
) -> None:
    leaf = torch.randn(shape).to(other_than(dtype)).requires_grad_()
    lowered = leaf.detach().to(dtype).requires_grad_()
    expected = call(lowered)
    out = expected[0] if isinstance(expected, list) else expected
    (wanted,) = torch.autograd.grad(out.sum(), lowered)
    with torch.autocast("cpu", dtype):
        found = call(leaf)
        out = found[0] if isinstance(found, list) else found
        (grad,) = torch.autograd.grad(out.sum(), leaf)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(grad, wanted.to(leaf.dtype), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_rotation_of_another_16_bit_dtype(inplace: bool, dtype: torch.dtype) -> None:
    """Torch's own cat refuses these tensors under autocast."""
    other = other_than(dtype)
    x, cos, sin = (torch.randn(shape).to(other) for shape in ((2, 5, 3, 8), (5, 3), (5, 3)))
    wanted = rotary.apply_rotary_emb(x.clone(), cos, sin, inplace=inplace)
    with torch.autocast("cpu", dtype):
        found = rotary.apply_rotary_emb(x, cos, sin, inplace=inplace)
    assert found.dtype == other
    assert torch.equal(found, wanted)
