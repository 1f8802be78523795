"""`flashvar.compat.flash_attn` in the place of `flash_attn`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch

import flashvar
from flashvar.compat import flash_attn as ours
from flashvar.compat.flash_attn import bert_padding
from flashvar.compat.flash_attn import flash_attn_interface as interface
from flashvar.compat.flash_attn.layers.rotary import apply_rotary_emb
from flashvar.errors import (
    BackendUnavailableError,
    ConfigurationError,
    InvalidInputError,
    ShapeError,
)


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    ours.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.mark.usefixtures("clean")
def test_stands_in() -> None:
    ours.install()
    ours.install()
    module = importlib.import_module("flash_attn")
    assert module is ours
    assert importlib.util.find_spec("flash_attn") is not None
    assert importlib.import_module("flash_attn.bert_padding") is bert_padding
    assert importlib.import_module("flash_attn.flash_attn_interface") is interface
    assert importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb is apply_rotary_emb
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.ops")
    ours.uninstall()
    ours.uninstall()
    assert "flash_attn" not in sys.modules
    assert "flash_attn.layers" not in sys.modules


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", ["flash_attn", "flash-attn", "Flash.Attn"])
def test_metadata_comes_and_goes_with_it(name: str) -> None:
    ours.install()
    assert metadata.version(name) == ours.__version__
    assert "flash-attn" in metadata.packages_distributions()["flash_attn"]
    assert metadata.version("torch") == torch.__version__
    ours.uninstall()
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version(name)


@pytest.mark.parametrize(
    "window", [(None, None), ("a", 1), (1.5, 2), torch.tensor([0.5, 2.0])], ids=str
)
def test_windows_that_are_none_are_refused_in_words(window: Any) -> None:
    q = torch.randn(1, 4, 1, 16)
    with pytest.raises(InvalidInputError, match="window_size must be two integers"):
        ours.flash_attn_func(q, q, q, window_size=window)
    with pytest.raises(InvalidInputError, match="window_size must be two integers"):
        interface._flash_attn_forward(q, q, q, 0.0, 1.0, False, *window)


def test_windows_may_be_integers_in_tensors() -> None:
    q = torch.randn(1, 9, 1, 16)
    sides = torch.tensor([3, -7])
    expected = ours.flash_attn_func(q, q, q, window_size=(3, -1))
    assert not torch.equal(expected, ours.flash_attn_func(q, q, q))
    assert torch.equal(ours.flash_attn_func(q, q, q, window_size=sides), expected)
    found = interface._flash_attn_forward(q, q, q, 0.0, torch.tensor(0.25), False, *sides)[0]
    assert torch.equal(found, expected)


def test_what_upstreams_tests_import() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(interface.maybe_contiguous(x.T), x.T)
    assert interface.maybe_contiguous(x.T).is_contiguous()
    assert interface.maybe_contiguous(None) is None


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_dropped_weights_are_normalized_by_the_stated_blocks(head_dim: int) -> None:
    q, k = torch.randn(1, 3, 1, head_dim), torch.randn(1, 200, 1, head_dim) * 3
    _, lse, shown = ours.flash_attn_func(q, k, k, dropout_p=0.3, return_attn_probs=True)
    scores = (q[0, :, 0] @ k[0, :, 0].T) * head_dim**-0.5
    size = interface._get_block_size_n(q.device, head_dim, True, False)
    parts = shown[0, 0, :3, :200].abs().split(size, -1)
    maxima = [scores[:, i * size :].amax(-1) for i in range(len(parts))]
    shares = [part * (m - lse[0, 0])[:, None].exp() for part, m in zip(parts, maxima, strict=True)]
    torch.testing.assert_close(torch.cat(shares, -1), scores.softmax(-1))


@pytest.mark.usefixtures("clean")
def test_another_one_is_kept_unless_told() -> None:
    other, part = ModuleType("flash_attn"), ModuleType("flash_attn.other")
    sys.modules.update({"flash_attn": other, "flash_attn.other": part})
    with pytest.raises(ConfigurationError, match=r"before flash_attn is imported.*replace=True"):
        ours.install()
    ours.install(replace=True)
    assert sys.modules["flash_attn"] is ours
    assert "flash_attn.other" not in sys.modules
    ours.uninstall()
    assert sys.modules["flash_attn"] is other
    assert sys.modules["flash_attn.other"] is part


def test_nothing_is_installed_by_importing() -> None:
    assert sys.modules.get("flash_attn") is not ours


def test_version_is_one_of_flash_attention_2() -> None:
    from packaging.version import Version

    assert Version("2.8") < Version(ours.__version__) < Version("3")
    assert ours.__version__.endswith("+flashvar")


def make() -> list[torch.Tensor]:
    q = torch.randn(2, 5, 4, 16)
    return [q, torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)]


def common(dropout_p: float = 0.0) -> tuple[Any, ...]:
    return (dropout_p, 0.3, True, 4, 0, 0.0, torch.full((4,), 0.5))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_below_autograd(dropout_p: float) -> None:
    q, k, v = (x.requires_grad_() for x in make())
    out, lse, weights, state = interface._flash_attn_forward(
        q, k, v, *common(dropout_p), dropout_p > 0
    )
    assert not out.requires_grad
    assert weights.shape == ((2, 4, 128, 128) if dropout_p else (0,))
    expected = flashvar.attention(
        q,
        k,
        v,
        scale=0.3,
        causal=True,
        window_size=(4, 0),
        alibi_slopes=torch.full((4,), 0.5),
        dropout_p=dropout_p,
        rng_state=state if dropout_p else None,
    )
    torch.testing.assert_close(out, expected.detach())
    grad_out = torch.randn_like(out)
    targets = [torch.empty_like(x) for x in (q, k, v)]
    sums = interface._flash_attn_backward(
        grad_out, q, k, v, out, lse, *targets, *common(dropout_p), False, state
    )
    assert sums.shape == (2, 4, 128)
    torch.testing.assert_close(sums[..., :5], (grad_out * out).sum(-1).transpose(1, 2))
    torch.testing.assert_close(targets, list(torch.autograd.grad(expected, (q, k, v), grad_out)))


def test_below_autograd_of_packed_sequences() -> None:
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in make())
    packing = (
        torch.tensor([0, 5, 10], dtype=torch.int32),
        torch.tensor([0, 7, 14], dtype=torch.int32),
        5,
        7,
    )
    out, lse, weights, state = interface._flash_attn_varlen_forward(q, k, v, *packing, *common())
    assert (lse.shape, weights.shape, state.shape) == ((4, 10), (0,), (2,))
    dq = torch.empty_like(q)
    sums = interface._flash_attn_varlen_backward(
        out, q, k, v, out, lse, dq, None, None, *packing, *common(), True
    )
    assert sums.shape == (4, 10 + 256)
    expected = flashvar.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=packing[0],
        cu_seqlens_k=packing[1],
        scale=0.3,
        causal=True,
        window_size=(4, 0),
        alibi_slopes=torch.full((4,), 0.5),
    )
    torch.testing.assert_close(dq, torch.autograd.grad(expected, q, out)[0])


def test_what_no_kernel_reads_is_refused() -> None:
    q, cu = torch.randn(9, 2, 16), torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(BackendUnavailableError, match="block_table and leftpad_k"):
        interface._flash_attn_varlen_forward(
            q, q, q, cu, cu, 9, 9, 0.0, None, False, leftpad_k=cu[:1]
        )
    with pytest.raises(BackendUnavailableError, match=r"not served yet.*seqused_k"):
        ours.flash_attn_with_kvcache(q, q, q)


MASK = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])


def test_unpadding_and_padding() -> None:
    states = torch.randn(2, 5, 3, 4, requires_grad=True)
    rows, places, cu, longest, used = bert_padding.unpad_input(states, MASK)
    assert (places.tolist(), longest) == ([0, 1, 5, 6, 7, 8], 4)
    assert (cu.tolist(), cu.dtype) == ([0, 2, 6], torch.int32)
    assert (used.tolist(), used.dtype) == ([2, 4], torch.int32)
    padded = bert_padding.pad_input(rows, places, 2, 5)
    torch.testing.assert_close(padded, states * MASK[..., None, None])
    (grad,) = torch.autograd.grad(padded.sum(), states)
    torch.testing.assert_close(grad, MASK[..., None, None].expand_as(states).float())


def test_unpadding_with_unused_rows() -> None:
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]])
    _, _, cu, longest, used = bert_padding.unpad_input(torch.randn(2, 5, 3), MASK, unused)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 8], 5, [2, 4])


def test_unpadding_of_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, places, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(
        torch.randn(3, 6, 4), lengths
    )
    assert cu.tolist() == [0, 2, 5, 8, 10, 16]
    assert (rows.shape, places.tolist()[4:6], longest) == ((16, 4), [4, 6], 6)


def test_first_axis() -> None:
    x, places = torch.randn(6, 3), torch.tensor([4, 1])
    torch.testing.assert_close(bert_padding.index_first_axis(x, places), x[places])
    some, whole = bert_padding.index_first_axis_residual(x, places)
    torch.testing.assert_close(some, x[places])
    assert whole is x
    put = bert_padding.index_put_first_axis(some, places, 6)
    assert put.count_nonzero() == 6


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[rows, heads, head_dim] turned as complex numbers by [rows, pairs]."""
    pairs = angles.shape[-1]
    part = x[..., : 2 * pairs]
    both = part.unflatten(-1, (pairs, 2)) if interleaved else part.unflatten(-1, (2, pairs)).mT
    numbers = (
        torch.view_as_complex(both.contiguous())
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    result = torch.view_as_real(numbers)
    result = result if interleaved else result.mT
    return torch.cat((result.flatten(-2), x[..., 2 * pairs :]), -1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("pairs", [8, 3])
def test_rotary(interleaved: bool, pairs: int) -> None:
    x, angles = torch.randn(2, 5, 3, 16), torch.randn(9, pairs)
    cos, sin = angles.cos(), angles.sin()
    expected = torch.stack(
        [turned(x[0], angles[:5], interleaved), turned(x[1], angles[3:8], interleaved)]
    )
    offsets = torch.tensor([0, 3])
    found = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    torch.testing.assert_close(found, expected)
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = apply_rotary_emb(
        x.flatten(0, 1), cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu
    )
    torch.testing.assert_close(packed.unflatten(0, (2, 5)), expected)
    target = x.clone()
    assert apply_rotary_emb(target, cos, sin, interleaved, True, offsets) is target
    torch.testing.assert_close(target, expected)


def test_rotary_leaves_unknown_positions_and_has_gradients() -> None:
    x, angles = torch.randn(1, 5, 1, 4, dtype=torch.float64, requires_grad=True), torch.ones(3, 2)
    out = apply_rotary_emb(x.float(), angles.cos(), angles.sin())
    torch.testing.assert_close(out[:, 3:], x[:, 3:].float())
    (grad,) = torch.autograd.grad(out[:, :3].square().sum(), x)
    torch.testing.assert_close(grad[:, :3], 2 * x[:, :3], rtol=1e-5, atol=1e-5)


def test_rotary_refuses_tables_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"at most 2\), got \(3, 4\)"):
        apply_rotary_emb(torch.randn(1, 3, 1, 4), torch.ones(3, 4), torch.ones(3, 4))
