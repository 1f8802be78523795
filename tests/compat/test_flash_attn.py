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
from flashvar.compat.flash_attn.ops.triton.rotary import apply_rotary
from flashvar.errors import (
    ConfigurationError,
    DtypeError,
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
    rotary = importlib.import_module("flash_attn.ops.triton.rotary")
    assert rotary.apply_rotary is apply_rotary
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
    assert metadata.version("pytest") == pytest.__version__
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


def test_splits_of_the_keys_are_accepted_and_change_nothing() -> None:
    """FlashAttention 2.8.4 has num_splits, last."""
    q, cu = torch.randn(9, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    arguments = (q, q, q, cu, cu, 5, 5, 0.0, None, True)
    expected = interface._flash_attn_varlen_forward(*arguments)
    found = interface._flash_attn_varlen_forward(*arguments, zero_tensors=False, num_splits=0)
    torch.testing.assert_close(found[:2], expected[:2])


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


def test_what_verl_imports(clean: None) -> None:
    ours.install()
    program = (
        "from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input"
    )
    names: dict[str, Any] = {}
    exec(program, names)
    ids = torch.arange(10).view(2, 5)
    rows, places, *_ = names["unpad_input"](ids[..., None], MASK)
    flat = names["rearrange"](ids[..., None], "b s ... -> (b s) ...")
    assert torch.equal(names["index_first_axis"](flat, places), rows)
    assert rows.flatten().tolist() == [0, 1, 5, 6, 7, 8]


def test_a_row_that_both_masks_name_counts_once() -> None:
    rows, _, cu, longest, used = bert_padding.unpad_input(torch.randn(2, 5, 3), MASK, MASK)
    assert (len(rows), cu.tolist(), longest, used.tolist()) == (6, [0, 2, 6], 4, [2, 4])
    documents = MASK * torch.tensor([[1], [3]])
    assert bert_padding.unpad_input(torch.randn(2, 5, 3), documents)[2].tolist() == [0, 2, 6]
    assert bert_padding.unpad_input(torch.randn(2, 5, 3), MASK.float())[2].tolist() == [0, 2, 6]


def test_padding_with_indices_of_32_bits_and_of_nothing() -> None:
    rows = torch.randn(2, 3)
    padded = bert_padding.pad_input(rows, torch.tensor([1, 3], dtype=torch.int32), 2, 2)
    torch.testing.assert_close(padded.flatten(0, 1)[[1, 3]], rows)
    found = bert_padding.unpad_input(torch.randn(0, 3, 2), torch.ones(0, 3))
    assert (found[2].tolist(), found[3]) == ([0], 0)


X = torch.randn(2, 5, 3)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "said"),
    [
        ("unpad_input", (X, None), InvalidInputError, "attention_mask must be a torch.Tensor"),
        ("unpad_input", ([1], MASK), InvalidInputError, "hidden_states must be a torch.Tensor"),
        ("unpad_input", (X, MASK[:, :4]), ShapeError, r"found \(2, 4\) with \(2, 5, 3\)"),
        ("unpad_input", (X, MASK[..., None]), ShapeError, r"must be \[batch, seqlen\]"),
        ("unpad_input", (X, MASK, MASK[:1]), ShapeError, "unused_mask must be"),
        ("unpad_input", (X, (1.0 - MASK) * -1e9), InvalidInputError, "pass mask == 0"),
        ("index_first_axis", (X, None), InvalidInputError, "indices must be a torch.Tensor"),
        ("index_first_axis", (X, MASK), ShapeError, r"indices \[n\]"),
        ("index_first_axis", (X, MASK[0] > 0), DtypeError, r"torch.bool: use mask.flatten\(\)"),
        ("index_first_axis", (X, torch.tensor([2])), ShapeError, "must be below 2, found values"),
        ("pad_input", (X, torch.tensor([1]), 2, 5), ShapeError, "a row for each of values"),
        ("pad_input", (X, torch.tensor([1, 9]), 2, 2), ShapeError, "must be below 4"),
        (
            "unpad_input_for_concatenated_sequences",
            (X, torch.tensor([[3, 3, 0, 0, 0], [1, 0, 0, 0, 0]])),
            ShapeError,
            r"at most 5, found \[3, 3, 1\]",
        ),
        (
            "unpad_input_for_concatenated_sequences",
            (X, MASK.float()),
            DtypeError,
            "must be of integers",
        ),
    ],
)
def test_padding_refuses_in_words(
    function: str, arguments: tuple[Any, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        getattr(bert_padding, function)(*arguments)
