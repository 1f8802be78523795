"""Whatever is passed for an argument, the answer is attention or our own words."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import flashvar
from flashvar import flash_attn, layers
from flashvar.compat import causal_conv1d as compat_conv1d
from flashvar.compat.flash_attn import bert_padding
from flashvar.compat.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_qkv_,
)
from flashvar.errors import FlashvarError, InvalidInputError
from flashvar.integrations.documents import Documents
from flashvar.ops.attention import problem

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


def kv_cache(**changes: Any) -> Any:
    given = {"q": DENSE[:, :1], "k_cache": DENSE, "v_cache": DENSE, "cache_seqlens": 3}
    return flash_attn.flash_attn_with_kvcache(**{**given, **changes})


def rotary_qkv(**changes: Any) -> Any:
    tables = {"cos": torch.ones(9, 4), "sin": torch.ones(9, 4)}
    return apply_rotary_emb_qkv_(**{"qkv": torch.ones(2, 5, 8, 8), **tables, **changes})


def rotary_layer(**changes: Any) -> Any:
    return RotaryEmbedding(8)(**{"qkv": torch.ones(2, 5, 3, 2, 8), **changes})


def last_columns(**changes: Any) -> Any:
    given = {"x": torch.arange(56.0).view(7, 8), "cu_seqlens": OFFSETS}
    return compat_conv1d.causal_conv1d_varlen_states(**{**given, **changes})


def padded(**changes: Any) -> Any:
    given = {"hidden_states": PACKED, "indices": torch.arange(7), "batch": 4, "seqlen": 4}
    return bert_padding.pad_input(**{**given, **changes})


def parameters(layer: torch.nn.Module) -> list[Any]:
    return [list(one.shape) for one in layer.parameters()]


def delta_net(**changes: Any) -> Any:
    layer = layers.GatedDeltaNet(**{"hidden_size": 4, "head_dim": 4, "num_heads": 2, **changes})
    assert all(type(x) is int for x in (layer.head_dim, layer.key_dim, layer.value_dim))
    return [*parameters(layer), layer.layer_idx]


def state_cache(**changes: Any) -> Any:
    cache = layers.StateCache()
    cache.update(recurrent_state=PACKED, **changes)
    return [len(cache), *map(cache.get_seq_length, range(len(cache)))]


def short_convolution(**changes: Any) -> Any:
    return parameters(layers.ShortConvolution(**{"hidden_size": 4, "kernel_size": 4, **changes}))


def norm(**changes: Any) -> Any:
    return parameters(layers.RMSNorm(**changes))


def gated_norm(**changes: Any) -> Any:
    return parameters(layers.FusedRMSNormGated(**changes))


def rotary_module(**changes: Any) -> Any:
    return RotaryEmbedding(**changes).inv_freq


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


# Every argument that is a whole number.
INTEGERS = [
    *((call, "window_size") for call in (dense, varlen, fa_dense, fa_varlen, kv_cache)),
    *((varlen, name) for name in ("max_seqlen_q", "max_seqlen_k")),
    *((fa_varlen, name) for name in ("max_seqlen_q", "max_seqlen_k")),
    (kv_cache, "cache_seqlens"),
    *((rotary, "seqlen_offsets"), (rotary_varlen, "max_seqlen"), (rotary_qkv, "num_heads_q")),
    *((rotary_layer, "seqlen_offset"), (rotary_module, "dim")),
    *((conv1d, "state_len"), (last_columns, "state_len")),
    *((padded, "batch"), (padded, "seqlen")),
    *((delta_net, name) for name in ("hidden_size", "head_dim", "num_heads", "num_v_heads")),
    *((delta_net, "conv_size"), (delta_net, "layer_idx")),
    *((state_cache, name) for name in ("layer_idx", "offset")),
    *((short_convolution, name) for name in ("hidden_size", "kernel_size")),
    *((norm, "hidden_size"), (gated_norm, "hidden_size")),
]


class Index:
    """A number of a library that has its own."""

    def __index__(self) -> int:
        return 4


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


@pytest.mark.parametrize("flag", [1, None, torch.tensor(True)], ids=str)
def test_return_lse_is_a_bool_as_other_flags_are(flag: Any) -> None:
    for call in (dense, varlen):
        with pytest.raises(InvalidInputError, match="return_lse must be True or False, found"):
            call(return_lse=flag)


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


@pytest.mark.parametrize(
    "four",
    [np.int64(4), np.array(4), torch.tensor(4), torch.tensor([4]).int()[0], Index()],
    ids=["int64 of numpy", "array", "tensor", "int32", "__index__"],
)
def test_an_integer_of_any_kind(four: Any) -> None:
    """As for torch's functions, whatever converts to an index is an integer."""
    wrong = []
    for call, name in INTEGERS:
        given, plain = ((one, 0) if name == "window_size" else one for one in (four, 4))
        try:
            torch.testing.assert_close(call(**{name: given}), call(**{name: plain}))
        except (FlashvarError, TypeError, AssertionError) as error:
            wrong.append(f"{call.__name__}({name}): {error!r}")
    assert wrong == []


@pytest.mark.parametrize(
    ("call", "option", "plain"),
    [
        (
            dense,
            {
                "window_size": (np.int64(2), np.int32(0)),
                "scale": 1 / np.sqrt(16),
                "softcap": np.float64(20),
                "dropout_p": np.float64(0),
            },
            {"window_size": (2, 0), "scale": 0.25, "softcap": 20.0},
        ),
        (
            fa_dense,
            {"window_size": (np.int32(2), np.uint8(0)), "softmax_scale": 1 / np.sqrt(16)},
            {"window_size": (2, 0), "softmax_scale": 0.25},
        ),
        (fa_varlen, {"max_seqlen_q": np.int32(4)}, {}),
        (conv1d, {"state_len": np.int64(4)}, {"state_len": 4}),
        (delta_rule, {"scale": 1 / np.sqrt(16)}, {"scale": 0.25}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_numbers_of_numpy_enter_a_graph(
    call: Call, option: dict[str, Any], plain: dict[str, Any]
) -> None:
    torch._dynamo.reset()

    def compiled(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = call(**option)
        return found + x

    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # later torch's default
        found = torch.compile(compiled, backend="aot_eager", fullgraph=True)(torch.zeros(()))
    torch.testing.assert_close(found, call(**plain))


@pytest.mark.parametrize(
    "odd", [True, np.True_, torch.tensor(True), 4.0, torch.tensor(4.0), "4"], ids=str
)
def test_no_integer(odd: Any) -> None:
    """But for the positions of rotary embeddings, which models compute as parts of a head dim."""
    pairs = [one for one in INTEGERS if one != (rotary_module, "dim")]
    windows = [pair for pair in pairs if pair[1] == "window_size"]
    assert taken([pair for pair in pairs if pair[1] != "window_size"], [odd]) == []
    assert taken(windows, [(odd, 0), (0, odd)]) == []


@pytest.mark.parametrize("call", [dense, varlen, fa_dense, kv_cache], ids=lambda f: f.__name__)
def test_a_window_in_a_tensor_is_read_in_each_call(call: Call) -> None:
    side = torch.tensor(0)
    for keys in (0, 1, 2):
        side.fill_(keys)
        assert torch.equal(call(window_size=(side, 0)), call(window_size=(keys, 0)))


def test_python_integers_are_not_asked_for_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what nearly every call has, and a call is to take little time."""
    monkeypatch.setattr(problem, "as_integer", None)
    given = (True, None, 3, 0, 0.0, 0.0, False, "bshd", "auto", 5, 4)
    assert problem.pack_options(*given) == given


def test_a_layer_before_the_first_is_refused() -> None:
    """It would be the last of a cache that has layers already."""
    cache = layers.StateCache()
    cache.update(3)
    with pytest.raises(InvalidInputError, match="layer_idx must be a whole number, not negative"):
        cache.update(-1)
    assert list(map(cache.get_seq_length, range(4))) == [0, 0, 0, 1]


def test_a_length_in_a_tensor_is_read_in_each_call() -> None:
    length = torch.tensor(2)
    for columns in (2, 3, 4):
        length.fill_(columns)
        assert conv1d(state_len=length).shape == (1, 8, columns)


@pytest.mark.parametrize("call", [rotary_varlen, varlen, fa_varlen], ids=lambda f: f.__name__)
def test_a_longest_length_enters_a_graph(call: Call) -> None:
    name = "max_seqlen" if call is rotary_varlen else "max_seqlen_q"
    torch._dynamo.reset()

    def compiled(lengths: torch.Tensor) -> Any:
        return call(**{name: lengths.max()})

    lengths = torch.tensor([3, 4])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # later torch's default
        found = torch.compile(compiled, backend="aot_eager", fullgraph=True)(lengths)
    torch.testing.assert_close(found, compiled(lengths))


@pytest.mark.parametrize(
    ("call", "name"),
    [(dense, "window_size"), (varlen, "max_seqlen_q"), (conv1d, "state_len")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_an_integer_in_a_tensor_while_compiled(call: Call, name: str) -> None:
    torch._dynamo.reset()

    def compiled(number: torch.Tensor) -> Any:
        return call(**{name: (number, 0) if name == "window_size" else number})

    found = torch.compile(compiled, backend="eager")(torch.tensor(4))
    torch.testing.assert_close(found, compiled(torch.tensor(4)))


@pytest.mark.parametrize("length", [torch.tensor([1, 2]), torch.tensor(4.5)], ids=str)
def test_lengths_in_tensors_that_are_none(length: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="max_seqlen_q must be a whole number"):
        fa_varlen(max_seqlen_q=length)


def test_dropout_beside_another_default_device() -> None:
    with torch.device("meta"):
        assert dense(dropout_p=0.5).device.type == "cpu"
