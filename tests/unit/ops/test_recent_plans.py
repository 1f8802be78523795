"""Plans of recent calls: of the same call only, and never where torch has to see a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashvar.ops import plans
from flashvar.ops.plans import Plans

KEY = ("an option",)
Tensors = tuple[Any, ...]


class Subclass(torch.Tensor):  # type: ignore[misc]
    """A tensor of another type."""


class Dispatched(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def call() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 3, 4), torch.ones(2, 5, 4)


@pytest.fixture
def kept() -> Plans[str]:
    """The plan of one call, and what is remembered of it."""
    found: Plans[str] = Plans()
    found.remember(KEY, call(), "made")
    return found


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(2, -1, -1)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda x: x[:, :2],
    "strides": expanded,
    "dtype": torch.Tensor.double,
    "device": lambda x: x.to("meta"),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "subclass": lambda x: x.as_subclass(Subclass),
    "negated view": lambda x: x._neg_view(),
    "zero tensor": lambda x: torch._efficientzerotensor(x.shape),
    "sparse": torch.Tensor.to_sparse,
    "sparse rows": lambda x: x[0].to_sparse_csr(),
    "mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "made under inference_mode": lambda x: torch.inference_mode()(torch.Tensor.clone)(x),
    "nothing": lambda x: None,
    "no tensor": lambda x: [x],
}


def test_the_same_call_is_found(kept: Plans[str]) -> None:
    assert kept.recent(KEY, call()) == ("made", False)
    assert kept.recent(("another",), call()) is None


@pytest.mark.filterwarnings("ignore:.*(prototype|beta)")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("place", [0, 1])
def test_another_call_is_not(kept: Plans[str], change: Callable[[Any], Any], place: int) -> None:
    tensors: list[Any] = list(call())
    tensors[place] = change(tensors[place])
    assert kept.recent(KEY, tuple(tensors)) is None


@contextmanager
def dual_level() -> Iterator[None]:
    with forward_ad.dual_level():
        yield


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": Dispatched,
    "function mode": TorchFunctionMode,
    "default device": lambda: torch.device("cpu"),
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "dual level": dual_level,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_nothing_is_found_in(kept: Plans[str], context: Callable[[], Any]) -> None:
    tensors = call()
    with context():
        assert kept.recent(KEY, tensors) is None
    assert kept.recent(KEY, tensors) is not None


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "vmap": torch.func.vmap,
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "functionalize": torch.func.functionalize,
    "make_fx": make_fx,
    "jit.trace": lambda f: lambda x: torch.jit.trace(f, x, check_trace=False),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_nothing_is_found_within(kept: Plans[str], transform: Callable[..., Any]) -> None:
    """Also of tensors that the transform does not know."""
    tensors, found = call(), []

    def asks(x: torch.Tensor) -> torch.Tensor:
        found.append(kept.recent(KEY, tensors))
        return x * 2

    transform(asks)(torch.ones(2))
    assert found
    assert set(found) == {None}
    assert kept.recent(KEY, tensors) is not None


def test_a_call_without_a_tensor_is_another() -> None:
    kept: Plans[str] = Plans()
    first, second = call()
    third = torch.ones(7)
    for given in ((first, None, second), (None, first, second), (first, second, third)):
        kept.remember(KEY, given, str([x is None for x in given]))
    for given in ((first, None, second), (None, first, second), (first, second, third)):
        assert kept.recent(KEY, given) == (str([x is None for x in given]), False)
    assert kept.recent(KEY, (first, second, None)) is None
    assert kept.recent(KEY, (first, None, third)) is None


def test_a_call_of_another_type_is_not_remembered() -> None:
    kept: Plans[str] = Plans()
    given = (torch.ones(3), torch.ones(2).as_subclass(Subclass))
    kept.remember(KEY, given, "made")
    assert kept.recent(KEY, given) is None


def test_it_says_whether_autograd_records() -> None:
    kept: Plans[str] = Plans()
    tensors = (torch.ones(2, requires_grad=True), torch.ones(2))
    kept.remember(KEY, tensors, "recorded")
    with torch.no_grad():
        kept.remember(KEY, tensors, "not recorded")
        assert kept.recent(KEY, tensors) == ("not recorded", False)
    assert kept.recent(KEY, tensors) == ("recorded", True)


def test_one_tensor_twice_is_another_call() -> None:
    kept: Plans[str] = Plans()
    x, y = torch.ones(3), torch.ones(3)
    calls = {"twice": (x, x, None), "two": (x, y, None), "at the end": (x, None, x)}
    for name, given in calls.items():
        assert kept.recent(KEY, given) is None
        kept.remember(KEY, given, name)
    for name, given in calls.items():
        assert kept.recent(KEY, given) == (name, False)
    assert kept.recent(KEY, (y, y, None)) == ("twice", False)
    assert kept.recent(KEY, (x, x, x)) is None
    assert kept.recent(KEY, (x, x)) is None


def test_the_most_recent_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_RECENT_KEPT", 2)
    monkeypatch.setattr(plans, "_CALLS_PER_REPLACEMENT", 1)
    monkeypatch.setattr(plans, "PLANS_KEPT", 3)
    kept: Plans[int] = Plans()
    for length in (1, 2, 3):
        kept.remember(KEY, (torch.ones(length),), length)
    assert [kept.recent(KEY, (torch.ones(n),)) for n in (1, 2, 3)] == [None, (2, False), (3, False)]
    for key in range(7):
        kept.remember(key, (torch.ones(1),), key)
    assert kept.recent(6, (torch.ones(1),)) == (6, False)
    assert len(kept._recent) <= 3


def test_one_of_many_calls_that_alternate_takes_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_RECENT_KEPT", 2)
    monkeypatch.setattr(plans, "_CALLS_PER_REPLACEMENT", 3)
    kept: Plans[int] = Plans()
    for length in (1, 2, 3, 4):
        kept.remember(KEY, (torch.ones(length),), length)
    assert [kept.recent(KEY, (torch.ones(n),)) for n in (1, 2, 3, 4)] == [
        *((1, False), (2, False)),
        *(None, None),
    ]
    kept.remember(KEY, (torch.ones(5),), 5)
    assert [kept.recent(KEY, (torch.ones(n),)) for n in (1, 2, 5)] == [None, (2, False), (5, False)]


def test_plans_can_be_printed() -> None:
    """Also those of tensors without memory, by a debugger or a report of pytest."""
    kept: Plans[torch.Tensor] = Plans()
    kept.keep(KEY, plans.prototype(torch.ones(3)))
    assert repr(kept) == "Plans of 1 kinds of calls"
