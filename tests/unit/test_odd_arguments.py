"""Whatever is passed for an argument, the answer is attention or our own words."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import flashvar
from flashvar import flash_attn
from flashvar.compat.flash_attn.layers.rotary import apply_rotary_emb
from flashvar.errors import InvalidInputError
from flashvar.integrations.documents import Documents

Call = Callable[..., Any]

OFFSETS = torch.tensor([0, 3, 7], dtype=torch.int32)
PACKED = torch.randn(7, 2, 8)
DENSE = torch.randn(2, 5, 2, 8)


def dense(**changes: Any) -> Any:
    return flashvar.attention(**{"q": DENSE, "k": DENSE, "v": DENSE, **changes})


def varlen(**changes: Any) -> Any:
    given = {"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens_q": OFFSETS}
    return flashvar.attention_varlen(**{**given, **changes})


def fa_dense(**changes: Any) -> Any:
    return flash_attn.flash_attn_func(**{"q": DENSE, "k": DENSE, "v": DENSE, **changes})


def fa_varlen(**changes: Any) -> Any:
    given = {"q": PACKED, "k": PACKED, "v": PACKED, "max_seqlen_q": 4, "max_seqlen_k": 4}
    offsets = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
    return flash_attn.flash_attn_varlen_func(**{**given, **offsets, **changes})


def fa_packed(**changes: Any) -> Any:
    return flash_attn.flash_attn_qkvpacked_func(**{"qkv": torch.randn(2, 5, 3, 2, 8), **changes})


def delta_rule(**changes: Any) -> Any:
    given = {"q": DENSE, "k": DENSE, "v": DENSE, "g": None, "beta": torch.ones(2, 5, 2)}
    return flashvar.gated_delta_rule(**{**given, **changes})[0]


def conv1d(**changes: Any) -> Any:
    given = {"x": torch.ones(1, 5, 8), "weight": torch.ones(8, 2), "return_final_state": True}
    return flashvar.causal_conv1d(**{**given, **changes})[1]


def rotary(**changes: Any) -> Any:
    tables = {"cos": torch.ones(9, 4), "sin": torch.ones(9, 4)}
    return apply_rotary_emb(**{"x": DENSE, **tables, **changes})


def rotary_varlen(**changes: Any) -> Any:
    return rotary(**{"x": PACKED, "cu_seqlens": OFFSETS, **changes})


def documents(**changes: Any) -> Any:
    return Documents.of_lengths(**changes)


NO_TENSORS = [True, 1, "x", [1.0], np.float32(0.5), np.zeros((2, 5, 2, 8)), torch.tensor(1.0)]
NO_NUMBERS = ["x", b"x", [1], (1,), {}, object(), torch.tensor(0.5), 1j]

TENSORS = [
    *((dense, name) for name in ("q", "k", "v", "bias", "sinks", "alibi_slopes", "rng_state")),
    *((varlen, name) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")),
    *((fa_dense, name) for name in ("q", "k", "v", "alibi_slopes")),
    *((fa_varlen, name) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
    (fa_packed, "qkv"),
]
NUMBERS = [
    *((dense, name) for name in ("scale", "softcap", "dropout_p", "window_size")),
    *((varlen, name) for name in ("max_seqlen_q", "max_seqlen_k", "dropout_p")),
    *((fa_dense, name) for name in ("softcap", "dropout_p", "window_size")),
    (delta_rule, "scale"),
]
# Python counts with True as with 1, and a tensor of one truth value converts to an integer.
TRUTHS = [True, np.True_, torch.tensor(True)]
COUNTS = [
    *((dense, name) for name in ("scale", "softcap", "dropout_p")),
    *((varlen, name) for name in ("max_seqlen_q", "max_seqlen_k")),
    *((fa_dense, name) for name in ("softcap", "dropout_p")),
    *((fa_varlen, name) for name in ("max_seqlen_q", "max_seqlen_k")),
    (delta_rule, "scale"),
    (conv1d, "state_len"),
    (rotary, "seqlen_offsets"),
    (rotary_varlen, "max_seqlen"),
]


def taken(pairs: list[tuple[Call, str]], values: list[Any]) -> list[str]:
    """What is not refused in words that name the argument."""
    found = []
    for (call, name), odd in product(pairs, values):
        try:
            call(**{name: odd})
        except InvalidInputError as error:
            if name in str(error):
                continue
            answer = str(error)
        except Exception as error:
            answer = repr(error)
        else:
            answer = "is served"
        found.append(f"{call.__name__}({name}={odd!r}): {answer}")
    return found


def test_no_tensor() -> None:
    assert taken(TENSORS, NO_TENSORS) == []


@pytest.mark.parametrize("call", [dense, varlen, fa_dense], ids=lambda call: call.__name__)
def test_no_tensor_with_dropout(call: Call) -> None:
    with pytest.raises(InvalidInputError, match="q must be a torch"):
        call(q=[1.0], dropout_p=0.5)


def test_no_number() -> None:
    assert taken(NUMBERS, NO_NUMBERS) == []


def test_a_truth_is_no_number() -> None:
    assert taken(COUNTS, TRUTHS) == []
    sides = [(truth, 1) for truth in TRUTHS]
    assert taken([(dense, "window_size"), (fa_dense, "window_size")], sides) == []
    lengths = [[3, truth] for truth in TRUTHS]
    assert taken([(documents, "lengths")], [*lengths, torch.tensor([True, True])]) == []


@pytest.mark.parametrize("call", [dense, varlen, delta_rule], ids=lambda call: call.__name__)
def test_a_scale_in_a_tensor_is_refused_with_the_way_out(call: Call) -> None:
    with pytest.raises(InvalidInputError, match=r"found a tensor: pass scale\.item\(\), or leave"):
        call(scale=torch.tensor(0.5))


@pytest.mark.parametrize(
    "odd",
    ["x", [1], torch.ones(2), torch.ones((), requires_grad=True), *TRUTHS],
    ids=str,
)
def test_no_scale(odd: object) -> None:
    """One in a tensor is taken, as FlashAttention 2 takes it."""
    with pytest.raises(InvalidInputError, match="scale must be"):
        fa_dense(softmax_scale=odd)
    torch.testing.assert_close(
        fa_dense(softmax_scale=torch.tensor(0.5)), fa_dense(softmax_scale=0.5)
    )


@pytest.mark.parametrize("name", ["softcap", "dropout_p"])
def test_no_number_at_all(name: str) -> None:
    with pytest.raises(InvalidInputError, match=name):
        dense(**{name: None})


@pytest.mark.parametrize("name", ["causal", "deterministic"])
def test_an_equal_call_before_changes_nothing(name: str) -> None:
    dense(**{name: True})
    with pytest.raises(InvalidInputError, match=f"{name} must be True or False, found 1"):
        dense(**{name: 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout_p", 1 - 2**-25),
        ("dropout_p", float("nan")),
        ("softcap", 1e-50),
        ("softcap", float("inf")),
        ("scale", 1e39),
        ("scale", float("nan")),
    ],
    ids=str,
)
def test_numbers_beyond_float32(name: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} must be .*float32"):
        dense(**{name: value})


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (dense, {"scale": np.float32(0.5)}),
        (dense, {"softcap": np.float64(20)}),
        (dense, {"window_size": (np.int64(2), np.int32(0))}),
        (varlen, {"max_seqlen_q": np.int64(4), "max_seqlen_k": np.int64(5)}),
        (fa_dense, {"window_size": (np.int64(-7), np.int64(1))}),
        (fa_varlen, {"max_seqlen_q": np.int32(4)}),
        (delta_rule, {"scale": np.float32(0.3)}),
        (delta_rule, {"scale": np.int64(3)}),
    ],
    ids=[
        *("scale", "softcap", "window", "lengths", "fa window", "fa length"),
        *("scale of the delta rule", "integer of the delta rule"),
    ],
)
def test_numbers_of_numpy_are_numbers(call: Call, option: dict[str, Any]) -> None:
    plain = {
        name: tuple(map(int, value)) if isinstance(value, tuple) else value.item()
        for name, value in option.items()
    }
    q = (PACKED if call in (varlen, fa_varlen) else DENSE).clone().requires_grad_()
    found = call(q=q, **option)
    found.sum().backward()
    assert q.grad is not None
    assert torch.equal(found, call(q=q, **plain))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # through torch's dispatcher
        assert torch.equal(call(**option), call(**plain))


def test_a_state_len_of_numpy() -> None:
    assert conv1d(state_len=np.int64(3)).shape == conv1d(state_len=3).shape


@pytest.mark.parametrize("length", [torch.tensor([1, 2]), torch.tensor(4.5)], ids=str)
def test_lengths_in_tensors_that_are_none(length: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="max_seqlen_q must be a whole number"):
        fa_varlen(max_seqlen_q=length)


def test_dropout_beside_another_default_device() -> None:
    with torch.device("meta"):
        assert dense(dropout_p=0.5).device.type == "cpu"
