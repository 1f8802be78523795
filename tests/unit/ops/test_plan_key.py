"""Two calls that differ in one thing alone: the second is not served as the first was.

Whatever the keys of plans hold is left out once, and each time the answer to some second call has
to change: a part that nothing here misses is not tested. The device is fake and sees what was
packed for it alone, so that a plan of other strides reads other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import fake_binary
import numpy
import pytest
import torch
from fake_binary import FakeBinary

from flashvar.errors import FlashvarError
from flashvar.ops.attention import plan as attention_plan
from flashvar.ops.attention.call import call as attention
from flashvar.ops.attention.problem import NO_TENSORS, Inputs, Options
from flashvar.ops.plans import Plans

# Fields of Inputs and of Options, and what is asked of the backward.
Call = dict[str, Any]
# The first call, what differs in the second, and what it becomes.
Pair = tuple[Callable[[], Call], str, Callable[[Any], Any]]
Path = tuple[int, ...]

BATCH, ROWS, KEYS, HEADS, DIM = 2, 5, 6, 4, 16
# Elements of the memory around a tensor, so that a wrong plan reads wrong numbers, but ours.
ROOM = 4096


def plain(rows: int = ROWS, keys: int = KEYS) -> Call:
    return {
        "q": torch.randn(BATCH, rows, HEADS, DIM).half(),
        "k": torch.randn(BATCH, keys, HEADS, DIM).half(),
        "v": torch.randn(BATCH, keys, HEADS, DIM).half(),
    }


def square() -> Call:
    return plain(HEADS, HEADS)


def full() -> Call:
    """Every optional tensor of a dense call."""
    return {
        **plain(),
        "bias": torch.randn(1, 1, ROWS, KEYS).half(),
        "sinks": torch.randn(HEADS),
        "alibi_slopes": torch.rand(BATCH, HEADS),
        "rng_state": torch.tensor([3, 4]),
        "dropout_p": 0.25,
    }


def packed() -> Call:
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    return {
        **{name: torch.randn(9, HEADS, DIM).half() for name in "qkv"},
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets.clone(),
        "seqused_k": torch.tensor([3, 4], dtype=torch.int32),
    }


def placed(like: torch.Tensor, shape: Any, strides: Any) -> torch.Tensor:
    """A tensor of this form in the middle of other numbers."""
    memory = torch.arange(ROOM) if not like.is_floating_point() else torch.randn(ROOM)
    return memory.to(like.dtype).as_strided(shape, strides)


def shape(*sizes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: placed(tensor, sizes, tensor.stride())


def strides(*distances: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: placed(tensor, tensor.shape, distances)


def dtype(wanted: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(wanted)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def value(wanted: Any) -> Callable[[Any], Any]:
    return lambda before: wanted


# In the order of the key: shapes, strides, dtypes and devices of q, k and v.
TENSORS: dict[str, Pair] = {
    "shape of q": (plain, "q", shape(BATCH, ROWS + 1, HEADS, DIM)),
    "shape of k": (plain, "k", shape(BATCH, KEYS + 1, HEADS, DIM)),
    "shape of v": (plain, "v", shape(BATCH, KEYS, HEADS, DIM - 8)),
    "strides of q": (plain, "q", strides(ROWS * HEADS * DIM, DIM, ROWS * DIM, 1)),
    "strides of k": (plain, "k", strides(KEYS * HEADS * DIM, DIM, KEYS * DIM, 1)),
    "strides of v": (plain, "v", strides(KEYS * HEADS * DIM, DIM, KEYS * DIM, 1)),
    **{f"dtype of {name}": (plain, name, dtype(torch.bfloat16)) for name in "qkv"},
    **{f"device of {name}": (plain, name, on_meta) for name in "qkv"},
}
# The others: a call with it, what becomes of its shape, its strides and its dtype.
FORMS = {
    "bias": (full, shape(BATCH, 1, ROWS, KEYS), strides(30, 30, 9, 1), torch.float32),
    "sinks": (full, shape(HEADS + 1), strides(2), torch.bfloat16),
    "alibi_slopes": (full, shape(BATCH + 1, HEADS), strides(7, 1), torch.float64),
    "rng_state": (full, shape(3), strides(2), torch.int32),
    "cu_seqlens_q": (packed, shape(BATCH + 2), strides(2), torch.int64),
    "cu_seqlens_k": (packed, shape(BATCH + 2), strides(2), torch.int64),
    "seqused_k": (packed, shape(BATCH + 1), strides(2), torch.int64),
}
# A tensor where there was none; else, where that is refused, none where there was one.
PRESENCE: dict[str, Pair] = {
    "bias": (lambda: {**full(), "bias": None}, "bias", lambda _: full()["bias"]),
    "sinks": (lambda: {**full(), "sinks": None}, "sinks", lambda _: full()["sinks"]),
    "alibi_slopes": (
        lambda: {**full(), "alibi_slopes": None},
        "alibi_slopes",
        lambda _: full()["alibi_slopes"],
    ),
    "seqused_k": (
        lambda: {**plain(), "rng_state": full()["rng_state"]},
        "seqused_k",
        lambda _: packed()["seqused_k"],
    ),
    **{
        name: (FORMS[name][0], name, value(None))
        for name in ("rng_state", "cu_seqlens_q", "cu_seqlens_k")
    },
}
OPTIONS: dict[str, Pair] = {
    "causal": (plain, "causal", value(True)),
    "scale": (plain, "scale", value(0.7)),
    "window_left": (plain, "window_left", value(1)),
    "window_right": (plain, "window_right", value(1)),
    "softcap": (plain, "softcap", value(0.5)),
    "dropout_p": (full, "dropout_p", value(0.5)),
    "deterministic": (plain, "deterministic", value(True)),
    "layout": (square, "layout", value("bhsd")),
    "backend": (plain, "backend", value("reference")),
    "max_seqlen_q": (packed, "max_seqlen_q", value(3)),
    "max_seqlen_k": (packed, "max_seqlen_k", value(3)),
}


class Text(str):
    """Equal to a str, with its hash."""


# A valid value of each option, and equal ones of the same hash that are refused.
ALIKE: dict[str, tuple[Callable[[], Call], Any, tuple[Any, ...]]] = {
    "causal": (plain, True, (1, 1.0, numpy.True_)),
    "scale": (plain, 1.0, (True, numpy.True_, Decimal(1), 1 + 0j)),
    "window_left": (plain, 1, (True, 1.0)),
    "window_right": (plain, 1, (True, 1.0)),
    "softcap": (plain, 1.0, (True, numpy.True_, Decimal(1), 1 + 0j)),
    "dropout_p": (plain, 0.0, (False, numpy.False_, Decimal(0), 0j)),
    "deterministic": (plain, True, (1, 1.0, numpy.True_)),
    "layout": (plain, "bshd", (Text("bshd"), numpy.str_("bshd"))),
    "backend": (plain, "auto", (Text("auto"), numpy.str_("auto"))),
    "max_seqlen_q": (packed, 5, (5.0, Decimal(5))),
    "max_seqlen_k": (packed, 5, (5.0, Decimal(5))),
}
TWINS: dict[str, Pair] = {
    f"{name}={bad!r} of {type(bad).__name__}": (
        lambda make=make, name=name, good=good: {**make(), name: good},
        name,
        value(bad),
    )
    for name, (make, good, bads) in ALIKE.items()
    for bad in bads
}
BACKWARD: dict[str, Pair] = {
    "strides of grad_out": (
        lambda: {**plain(), "grad_out": (640, 64, 16, 1)},
        "grad_out",
        value((640, 16, 128, 1)),
    ),
    "gradient of bias": (full, "wants_bias", value(True)),
    "gradient of sinks": (full, "wants_sinks", value(True)),
}


def parts_of_key() -> Iterator[tuple[str, Path, Pair]]:
    """Each part of a key: its name, where it is, and the calls that differ in it alone."""
    for place, (name, pair) in enumerate(TENSORS.items()):
        yield name, (place,), pair
    extras = len(TENSORS)
    yield "extras", (extras,), (full, "bias", FORMS["bias"][1])
    for place, name in enumerate(Inputs._fields[3:]):
        make, *forms, wanted = FORMS[name]
        changes = (*forms, dtype(wanted), on_meta)
        yield name, (extras, place), PRESENCE[name]
        for which, (word, change) in enumerate(
            zip(("shape", "strides", "dtype", "device"), changes, strict=True)
        ):
            yield f"{word} of {name}", (extras, place, which), (make, name, change)
    yield "options", (extras + 1,), OPTIONS["causal"]
    for place, name in enumerate(Options._fields):
        yield name, (extras + 1, place), OPTIONS[name]
    yield "types of options", (extras + 2,), next(iter(TWINS.values()))


PARTS = list(parts_of_key())
PAIRS = {name: pair for name, _, pair in PARTS} | BACKWARD


class Forgetful(Plans[Any]):
    """Plans whose key lacks a part."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._lost(key, self.path), default)

    def __setitem__(self, key: Any, made: Any) -> None:
        super().__setitem__(self._lost(key, self.path), made)

    def remember(self, key: Any, tensors: Any, made: Any) -> None:
        """Nothing: then every call is looked up by its key."""

    def _lost(self, key: Any, path: Path) -> Any:
        if not path:
            return None
        place, *rest = path
        if not isinstance(key, tuple) or key[place] is None:
            return key
        return (*key[:place], self._lost(key[place], tuple(rest)), *key[place + 1 :])


@pytest.fixture
def binary(monkeypatch: pytest.MonkeyPatch) -> FakeBinary:
    forget(monkeypatch)
    return fake_binary.install(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_plans", Plans())
    monkeypatch.setattr(attention_plan, "_backward_plans", Plans())


def two_calls(pair: Pair) -> tuple[Call, Call]:
    make, name, change = pair
    first = make()
    return first, {**first, name: change(first.get(name))}


class Refusal(str):
    """The name of an error, and the argument that its message begins with."""

    argument: str

    def __new__(cls, error: Exception) -> Refusal:
        refusal = super().__new__(cls, type(error).__name__)
        refusal.argument = str(error).partition(" ")[0]
        return refusal


def answers(call: Call, binary: FakeBinary, differentiated: bool = True) -> list[Any] | str:
    """Output, log-sum-exp, gradients, what the device was asked for; or the name of an error."""
    binary.calls.clear()
    given = [call.get(name) for name in Inputs._fields]
    wanted = [0, 1, 2, *([3] if call.get("wants_bias") else [])] if differentiated else []
    wanted += [4] if differentiated and call.get("wants_sinks") else []
    for place in wanted:
        given[place] = given[place].detach().requires_grad_()
    inputs = Inputs._make(given)
    options = Options(**{name: call[name] for name in Options._fields if name in call})
    extras = NO_TENSORS if inputs[3:] == NO_TENSORS else tuple(inputs[3:])
    try:
        out, lse = attention(*inputs[:3], extras, tuple(options), True)
        grads = []
        if differentiated:
            # The strides do not follow from the shape of the output.
            distances = call.get("grad_out", (640, 64, 16, 1))[-out.dim() :]
            grad_out = torch.linspace(-1, 1, ROOM).half().as_strided(out.shape, distances)
            grad_lse = torch.linspace(-1, 1, lse.numel()).view(lse.shape)
            leaves = [given[place] for place in wanted]
            grads = torch.autograd.grad([out, lse], leaves, [grad_out, grad_lse])
    except (FlashvarError, AssertionError, RuntimeError) as error:
        return Refusal(error)
    return [out.detach(), lse.detach(), *grads, *binary.calls]


def alike(found: list[Any] | str, expected: list[Any] | str) -> bool:
    if isinstance(found, Refusal) and isinstance(expected, Refusal):
        return (found, found.argument) == (expected, expected.argument)
    if isinstance(found, str) or isinstance(expected, str) or len(found) != len(expected):
        return found == expected
    return all(
        a == b
        if isinstance(a, str) or isinstance(b, str)
        else a.shape == b.shape and torch.allclose(a, b, rtol=2e-3, atol=2e-3, equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_the_second_call_is_right(
    pair: Pair, binary: FakeBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_calls(pair)
    assert isinstance(answers(first, binary), list)
    found = answers(second, binary)
    forget(monkeypatch)
    assert alike(found, answers(second, binary))
    if isinstance(found, list):
        by_reference = answers({**second, "backend": "reference"}, binary)
        assert alike([x for x in found if not isinstance(x, str)], by_reference)


@pytest.mark.parametrize("pair", TWINS.values(), ids=TWINS)
def test_an_equal_value_of_another_type_is_refused(pair: Pair, binary: FakeBinary) -> None:
    first, second = two_calls(pair)
    for _ in range(2):
        assert isinstance(answers(first, binary), list)
        assert answers(second, binary) in ("InvalidInputError", "LayoutError")


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_of_other_types_are_served_as_before(name: str, binary: FakeBinary) -> None:
    for number in (numpy.float64(0.5), Fraction(1, 2), 0.5):
        torch.manual_seed(0)
        expected = answers({**plain(), name: 0.5}, binary)
        torch.manual_seed(0)
        assert alike(answers({**plain(), name: number}, binary), expected)


@pytest.mark.parametrize(("path", "pair"), [x[1:] for x in PARTS], ids=[x[0] for x in PARTS])
def test_no_part_of_the_key_can_be_left_out(
    path: Path, pair: Pair, binary: FakeBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_calls(pair)
    expected = answers(second, binary, differentiated=False)
    forget(monkeypatch)
    monkeypatch.setattr(attention_plan, "_plans", Forgetful(path))
    answers(first, binary, differentiated=False)
    unnoticed = alike(answers(second, binary, differentiated=False), expected)
    assert not unnoticed


# Where the parts of BACKWARD are in the key of a backward.
PLACES = ((1,), (2, 0), (2, 1))
# A backward reads sinks in the log-sum-exp alone; their gradient is computed outside of its launch.
UNREAD = ("sinks", "dtype of sinks")
OF_BACKWARD = [(name, (0, *path), pair) for name, path, pair in PARTS if name not in UNREAD] + [
    (name, path, pair) for path, (name, pair) in zip(PLACES, BACKWARD.items(), strict=True)
]


@pytest.mark.parametrize(
    ("path", "pair"), [x[1:] for x in OF_BACKWARD], ids=[x[0] for x in OF_BACKWARD]
)
def test_no_part_of_the_key_of_a_backward_can_be_left_out(
    path: Path, pair: Pair, binary: FakeBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_calls(pair)
    expected = answers(second, binary)
    forget(monkeypatch)
    monkeypatch.setattr(attention_plan, "_backward_plans", Forgetful(path))
    answers(first, binary)
    # What the forward refuses has no backward.
    unnoticed = alike(answers(second, binary), expected)
    assert unnoticed == isinstance(expected, str)


def test_every_part_of_the_keys_is_left_out_somewhere(binary: FakeBinary) -> None:
    answers(full(), binary)
    (key,) = attention_plan._plans
    (backward,) = attention_plan._backward_plans
    places = [path for _, path, _ in PARTS]
    assert len(key) == len({path[0] for path in places})
    for place, part in enumerate(key):
        if isinstance(part, tuple) and (place, 0) in places:
            assert len(part) == sum(path[:1] == (place,) and len(path) == 2 for path in places)
    facts = key[len(TENSORS)][0]
    assert len(facts) == sum(path[:2] == (len(TENSORS), 0) and len(path) == 3 for path in places)
    assert len(backward) == 1 + len({path[0] for path in PLACES})
    assert len(backward[2]) == sum(path[0] == 2 for path in PLACES)
