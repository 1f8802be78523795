"""`flashvar.integrations.torch`: scaled_dot_product_attention through flashvar, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sdpa_calls import B, D, H, L, S, computed, made, qkv
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from flashvar.errors import BackendUnavailableError, InvalidInputError
from flashvar.integrations import fallback
from flashvar.integrations import torch as ours
from flashvar.integrations.torch.sdpa import why_not

OWN = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FLASHVAR_STRICT", raising=False)
    monkeypatch.setattr(fallback, "_logged", set())
    yield
    ours.deactivate()
    assert functional.scaled_dot_product_attention is OWN


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal-square": {"lengths": (L, L), "is_causal": True},
    "causal-more-keys": {"lengths": (5, 9), "is_causal": True},
    "causal-more-queries": {"lengths": (9, 5), "is_causal": True},
    "causal-one-key": {"lengths": (9, 1), "is_causal": True},
    "gqa": {"heads_kv": 2, "enable_gqa": True},
    "bool-mask": {"attn_mask": torch.rand(B, H, L, S) > 0.4},
    "bool-padding": {"attn_mask": torch.arange(S).expand(B, 1, 1, S) < 6},
    "bool-strided": {"attn_mask": (torch.rand(S, L) > 0.4).T},
    "bool-row-without-keys": {"attn_mask": torch.ones(L, S, dtype=torch.bool).tril(-2)},
    "float-mask-2d": {"attn_mask": made(L, S)},
    "float-mask-3d": {"attn_mask": made(H, L, S)},
    "float-mask-row": {"attn_mask": made(B, 1, 1, S)},
    "float-mask-with-gradient": {"attn_mask": made(1, H, 1, S, requires_grad=True)},
    "lower-right": {"attn_mask": causal_lower_right(L, S)},
    "lower-right-strided": {"attn_mask": causal_lower_right(L, S), "strided": True},
    "rows-not-contiguous": {"strided": True, "is_causal": True, "lengths": (L, L)},
    "upper-left": {"attn_mask": causal_upper_left(L, S)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_torchs_own(case: dict[str, Any]) -> None:
    options = dict(case)
    tensors = list(qkv(options.pop("lengths", (L, S)), options.pop("heads_kv", H)))
    if options.pop("strided", False):
        tensors = [x.mT.detach().contiguous().mT.requires_grad_() for x in tensors]
        assert tensors[0].stride(-1) != 1
    expected = computed(*tensors, **options)
    with ours.activate(backend="reference"):
        found = computed(*tensors, **options)
        assert ours.last_reason() is None
        assert ours.report() == {ours.RUN: 1}
    for want, have in zip(expected, found, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"is_causal": True}, {"attn_mask": torch.randn(9, 9)}),
        {"attn_mask": causal_lower_right(7, 9)},
    ],
)
@pytest.mark.parametrize("seqlen_first", [False, True])
def test_lies_in_memory_as_torchs_own(seqlen_first: bool, options: dict[str, Any]) -> None:
    queries = 7 if isinstance(options.get("attn_mask"), CausalBias) else 9
    q, k, v = (torch.randn(2, rows, 4, 16).transpose(1, 2) for rows in (queries, 9, 9))
    if not seqlen_first:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    expected = OWN(q, k, v, **options)
    with ours.activate(backend="reference"):
        found = functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride() == q.stride()


def test_scales_that_are_no_floats() -> None:
    q = torch.randn(1, 2, 5, 8)
    expected = functional.scaled_dot_product_attention(q, q, q, scale=0.5)
    numbers = (torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64).numpy()[()])
    with ours.activate("reference"):
        for scale in numbers:
            found = functional.scaled_dot_product_attention(q, q, q, scale=scale)
            torch.testing.assert_close(found, expected)
        for scale in (True, np.True_, torch.tensor(True)):
            found = functional.scaled_dot_product_attention(q, q, q, scale=scale)
            torch.testing.assert_close(found, OWN(q, q, q, scale=1.0))


@pytest.mark.parametrize("kind", [bool, np.bool_, torch.tensor], ids=["bool", "numpy", "tensor"])
def test_probabilities_that_are_no_floats(kind: Any) -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    expected = OWN(q, k, k, mask)
    with ours.activate("reference"):
        for seen in (mask, causal_lower_right(5, 7)):
            found = functional.scaled_dot_product_attention(q, k, k, seen, kind(0.0))
            assert ours.last_reason() is None
            torch.testing.assert_close(found, expected)


def test_a_tensor_as_scale_is_read_at_every_call() -> None:
    q = torch.randn(1, 2, 8, 16)
    scale = torch.tensor(0.5)
    with ours.activate("reference"):
        functional.scaled_dot_product_attention(q, q, q, scale=scale)
        scale.fill_(2.0)
        found = functional.scaled_dot_product_attention(q, q, q, scale=scale)
    torch.testing.assert_close(found, OWN(q, q, q, scale=2.0))


def test_importing_changes_nothing() -> None:
    assert OWN is torch._C._nn.scaled_dot_product_attention
    assert not ours.active()


def fits(case: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """A call that flashvar leaves to torch."""
    q, k, v = (x.detach() for x in qkv())
    options: dict[str, Any] = {}
    if case == "3 and 3 dimensions":
        q, k, v = q[0], k[0], v[0]
    elif case == "broadcast":
        k, v = k[:1], v[:1]
    elif case == "without enable_gqa":
        k, v = k[:, :1], v[:, :1]
    elif case == "empty":
        q = q[:, :, :0]
    elif case == "dropout_p is not a":
        options = {"dropout_p": 1.0}
    elif case == "column for each key":
        options = {"attn_mask": made(L, 1)}
    elif case == "contiguous in its keys":
        options = {"attn_mask": made(S, L).T}
    elif case == "the type":
        q = q.as_subclass(Tagged)
    return [q, k, v], options


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "words",
    [
        "3 and 3 dimensions",
        "broadcast",
        "without enable_gqa",
        "empty",
        "dropout_p is not a",
        "column for each key",
        "contiguous in its keys",
        "the type",
    ],
)
def test_leaves_to_torch_what_it_does_not_serve(
    words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, options = fits(words)
    expected = OWN(*tensors, **options)
    with ours.activate(backend="reference"), caplog.at_level(logging.WARNING, "flashvar"):
        for _ in range(2):
            out = functional.scaled_dot_product_attention(*tensors, **options)
            torch.testing.assert_close(out, expected, equal_nan=True)
            reason = ours.last_reason()
            assert reason is not None
            assert words in reason
        assert [record.message for record in caplog.records] == [
            f"scaled_dot_product_attention: {reason}; such calls take torch's own"
        ]
        monkeypatch.setenv("FLASHVAR_STRICT", "1")
        with pytest.raises(BackendUnavailableError, match=r"FLASHVAR_STRICT=1"):
            functional.scaled_dot_product_attention(*tensors, **options)


@pytest.mark.parametrize("which", ["qkv", "v"])
def test_empty_head_dims_are_left_to_torch(which: str) -> None:
    tensors = {name: x.detach() for name, x in zip("qkv", qkv(), strict=True)}
    tensors |= {name: tensors[name][..., :0] for name in which}
    with ours.activate(backend="reference"):
        out = functional.scaled_dot_product_attention(*tensors.values())
        assert ours.last_reason() == "a tensor is empty"
    torch.testing.assert_close(out, OWN(*tensors.values()))


def test_keys_without_heads_are_left_to_torch() -> None:
    """Asked alone: torch 2.8 divides by them, which ends the process."""
    q, k, v = (x.detach() for x in qkv())
    reason = why_not(q, k[:, :0], v[:, :0], None, 0.0, False, None, True, "bhsd", "reference")
    assert reason == "a tensor is empty"


def test_the_cpu_is_left_to_torch_unless_a_backend_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FLASHVAR_BACKEND", raising=False)
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    q, k, v = qkv()
    with ours.activate():
        functional.scaled_dot_product_attention(q, k, v)
        assert "CPU tensors" in str(ours.last_reason())
    assert not caplog.records
    monkeypatch.setenv("FLASHVAR_BACKEND", "reference")
    with ours.activate():
        functional.scaled_dot_product_attention(q, k, v)
        assert ours.last_reason() is None


def test_an_unknown_backend_changes_nothing() -> None:
    with pytest.raises(InvalidInputError, match="expected one of"):
        ours.activate(backend="cudnn")  # type: ignore[arg-type]
    assert not ours.active()


def test_activations_nest_and_end() -> None:
    assert not ours.active()
    q, k, v = qkv()
    outer = ours.activate(backend="reference")
    with ours.activate(), ours.activate():
        functional.scaled_dot_product_attention(q, k, v)
        assert "CPU tensors" in str(ours.last_reason())
    functional.scaled_dot_product_attention(q, k, v)
    assert ours.last_reason() is None
    with pytest.raises(KeyError), outer:
        raise KeyError
    assert not ours.active()
    ours.deactivate()
    ours.activate()
    ours.activate()
    ours.deactivate()
    assert not ours.active()


def test_sdpa_kernel_is_heard() -> None:
    q, k, v = qkv()
    with ours.activate(backend="reference"), sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(q, k, v)
        assert "switched off" in str(ours.last_reason())
        (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        torch.autograd.grad(first.square().sum(), q)  # flashvar has no second derivative


def test_functorch_and_forward_mode_go_to_torch() -> None:
    q, k, v = (x.detach() for x in qkv())

    def loss(q: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v).square().sum()

    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q)
    with ours.activate(backend="reference"):
        torch.func.grad(loss)(q)
        assert "functorch" in str(ours.last_reason())
        with sdpa_kernel(SDPBackend.MATH):
            found = torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q)
    torch.testing.assert_close(found, expected)


def test_autocast_decides_the_dtype() -> None:
    q, k, v = (x.detach().float() for x in qkv())
    with ours.activate(backend="reference"), torch.autocast("cpu", torch.bfloat16):
        out = functional.scaled_dot_product_attention(q, k, v, torch.ones(L, S, dtype=torch.bool))
        assert ours.last_reason() is None
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, OWN(q, k, v), atol=2e-2, rtol=2e-2)


def test_repeated_calls_follow_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=torch.bfloat16) for _ in "qkv")
    with ours.activate(backend="reference"):
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                assert functional.scaled_dot_product_attention(q, k, v).dtype == dtype
        monkeypatch.setattr("flashvar.integrations.torch.activation.why_not", None)
        monkeypatch.setattr("flashvar.integrations.torch.sdpa.call_plain", None)
        with torch.autocast("cpu", torch.bfloat16):
            assert functional.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert ours.report() == {ours.RUN: 5}


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32, torch.float16])
def test_autocast_makes_one_dtype_of_several(mask: torch.dtype | None) -> None:
    """A layer in float32 between others, a mask of a third dtype, rows not contiguous."""
    q, k, v = (x.detach() for x in qkv())
    tensors = [q.float(), k.bfloat16(), v.float().mT.contiguous().mT]
    options = {} if mask is None else {"attn_mask": torch.ones(L, S).tril(2).to(mask)}
    with torch.autocast("cpu", torch.bfloat16):
        leaves = [x.detach().requires_grad_() for x in tensors]
        expected = computed(*leaves, **options)
        with ours.activate(backend="reference"):
            found = computed(*leaves, **options)
            assert ours.report() == {ours.RUN: 1}
    for have, want in zip(found, expected, strict=True):
        assert have.dtype == want.dtype
        torch.testing.assert_close(have.float(), want.float(), atol=4e-2, rtol=4e-2)
    with ours.activate(backend="reference"), pytest.raises(RuntimeError, match="dtype"):
        functional.scaled_dot_product_attention(*tensors)  # as torch's own says without autocast


def test_dropout_draws_from_torchs_generator() -> None:
    q, k, v = qkv((64, 64))
    with ours.activate(backend="reference"):
        outs = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outs.append(functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
        assert ours.last_reason() is None
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_transformer_encoder(training: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    model.train(training)
    x, padding = made(3, 10, 32), torch.arange(10).expand(3, 10) >= torch.tensor([[10], [7], [4]])
    expected = model(x, src_key_padding_mask=padding)
    with ours.activate(backend="reference"):
        assert not torch.backends.mha.get_fastpath_enabled()
        with torch.set_grad_enabled(training):
            found = model(x, src_key_padding_mask=padding)
        assert ours.report() == {ours.RUN: 2}
    assert torch.backends.mha.get_fastpath_enabled()
    torch.testing.assert_close(found[~padding], expected[~padding])


def test_multihead_attention_without_weights() -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).double()
    x = made(2, 6, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x, x, x, need_weights=False)[0].sum(), x)
    with ours.activate(backend="reference"):
        (found,) = torch.autograd.grad(module(x, x, x, need_weights=False)[0].sum(), x)
        assert ours.report() == {ours.RUN: 1}
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_go_to_torch() -> None:
    rows = [torch.randn(length, H, D) for length in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    expected = OWN(nested, nested, nested)
    with ours.activate(backend="reference"):
        found = functional.scaled_dot_product_attention(nested, nested, nested)
        assert "NestedTensor" in str(ours.last_reason())
    torch.testing.assert_close(found.values(), expected.values())
