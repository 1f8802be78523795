"""Which tensors may skip torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flashvar
from flashvar.errors import InvalidInputError, LayoutError
from flashvar.ops.attention import plan as plans
from flashvar.ops.attention.problem import NO_TENSORS, Options
from flashvar.ops.attention.torch_library import attention_fwd
from flashvar.ops.causal_conv1d import api as convolution
from flashvar.ops.dispatch_modes import are_plain, as_list, have_values


class Own(torch.Tensor):
    """A subclass that may want to see calls."""


@pytest.mark.parametrize(
    ("x", "plain"),
    [
        (torch.ones(2), True),
        (torch.nn.Parameter(torch.ones(2)), True),
        (torch.ones(2).as_subclass(Own), False),
        (torch._neg_view(torch.ones(2)), False),
        (torch.ones(2, dtype=torch.complex64).conj().imag, False),
        (torch._efficientzerotensor(2), False),
        (torch._to_functional_tensor(torch.ones(2)), False),
        (None, False),
    ],
    ids=["tensor", "parameter", "subclass", "negated", "imaginary", "zero", "functional", "none"],
)
def test_plain(x: torch.Tensor | None, plain: bool) -> None:
    assert are_plain(x) is plain
    assert are_plain(torch.ones(2), x) is plain
    assert convolution._are_plain(torch.ones(2), torch.ones(2), torch.ones(2), None)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_attention_of_a_negated_view(place: int) -> None:
    given = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    lazy = [torch._neg_view(x) if i == place else x for i, x in enumerate(given)]
    real = [x.neg() if i == place else x for i, x in enumerate(given)]
    assert torch.equal(flashvar.attention(*lazy), flashvar.attention(*real))


def functionalized(call: Callable[..., torch.Tensor], place: int, *tensors: Any) -> torch.Tensor:
    """The result of a call whose tensor at `place` is functional, without a mode that says so."""
    torch._enable_functionalization(reapply_views=True)
    try:
        functional = torch._to_functional_tensor(tensors[place])
        found = call(*tensors[:place], functional, *tensors[place + 1 :])
        return torch._from_functional_tensor(found)
    finally:
        torch._disable_functionalization()


def attention_of_op(*tensors: torch.Tensor) -> torch.Tensor:
    return attention_fwd(*tensors, *NO_TENSORS, *Options())[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("call", [flashvar.attention, attention_of_op], ids=["function", "op"])
def test_attention_of_a_functional_tensor(call: Callable[..., torch.Tensor], place: int) -> None:
    """Its own memory is empty: the values are in the tensor that it wraps."""
    given = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    expected = call(*given)
    for _ in range(2):
        assert torch.equal(functionalized(call, place, *given), expected)


def gradient_of_op(*tensors: torch.Tensor) -> torch.Tensor:
    """The gradient of q."""
    grad_out, out, lse, *given = tensors
    arguments = (False, False, *given, *NO_TENSORS, *Options())
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = torch.ops.flashvar.attention_bwd.default(
            grad_out, None, out, lse, *arguments
        )
    return found[0]


@pytest.mark.parametrize("place", range(4))
def test_the_op_of_a_backward_of_a_functional_tensor(place: int) -> None:
    given = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    out, lse = flashvar.attention(*given, return_lse=True)
    tensors = [torch.randn_like(out), out, lse, given[0]]

    def gradient(grad_out: Any, out: Any, lse: Any, q: Any) -> torch.Tensor:
        return gradient_of_op(grad_out, out, lse, q, *given[1:])

    expected = gradient(*tensors)
    for _ in range(2):
        assert torch.equal(functionalized(gradient, place, *tensors), expected)


@pytest.mark.parametrize("place", range(3))
def test_the_op_of_a_backward_of_another_device(place: int) -> None:
    """A kernel would read an address of that device."""
    given = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    out, lse = flashvar.attention(*given, return_lse=True)
    tensors = [torch.randn_like(out), out, lse]
    tensors[place] = tensors[place].to("meta")
    with pytest.raises(InvalidInputError, match=r"on cpu.*found.*on meta"):
        gradient_of_op(*tensors, *given)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_gradients_of_a_negated_view(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read memory: what they get must hold the values."""
    passed: list[torch.Tensor] = []
    backward = plans.backward

    def seen(*arguments: Any) -> Any:
        grad_out, _, inputs, *_ = arguments
        passed.extend(x for x in (grad_out, *inputs) if x is not None)
        return backward(*arguments)

    monkeypatch.setattr(plans, "backward", seen)
    given = [torch.randn(1, 5, 2, 8) for _ in range(3)] + [torch.randn(1, 2, 5, 5)]
    given[place] = torch._neg_view(given[place])
    q, k, v, bias = (x.requires_grad_() for x in given)
    flashvar.attention(q, k, v, bias=bias).sum().backward()
    assert passed
    assert all(map(are_plain, passed))


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "none": lambda f: f(torch.ones(())),
    "grad": lambda f: torch.func.grad(f)(torch.ones(())),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(()),), (torch.ones(()),)),
    "vmap": lambda f: torch.vmap(f)(torch.ones(2)),
    "grad of vmap": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x.expand(2)).sum())(
        torch.ones(())
    ),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(f))(torch.ones(2)),
    "grad of grad": lambda f: torch.func.grad(torch.func.grad(lambda x: f(x).square()))(
        torch.ones(())
    ),
    "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(())),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_values_inside_of_transforms(transform: Callable[..., Any]) -> None:
    """Of a tensor from outside, and of one that is made inside, which torch wraps."""
    offsets, found = torch.tensor([0, 3, 7]), []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append((as_list(offsets), as_list(offsets.diff())))
        return x * 2

    transform(f)
    assert found == [([0, 3, 7], [3, 4])]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_only_mapped_tensors_have_no_values(name: str) -> None:
    offsets, found = torch.tensor([0, 3, 7]), []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append((have_values(None, offsets, offsets.diff()), have_values(x)))
        return x * 2

    TRANSFORMS[name](f)
    assert found == [(True, "vmap" not in name)]


def test_traced_tensors_have_no_values() -> None:
    found = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append(have_values(x))
        return x * 2

    x = torch.ones(2)
    make_fx(f)(x)
    with FakeTensorMode():
        f(torch.ones(2))
    f(x)
    assert found == [False, False, True]


def test_values_while_compiling() -> None:
    def f(lengths: torch.Tensor) -> torch.Tensor:
        return torch.tensor([*as_list(lengths), 1])

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="eager")
    assert torch.equal(compiled(torch.tensor([2, 3])), torch.tensor([2, 3, 1]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_states_of_a_negated_view_are_refused(mode: Any) -> None:
    negated = torch._neg_view(torch.randn(2, 6, 3))
    rows, pool = torch.randn(2, 1, 2, 4), torch._neg_view(torch.randn(2, 2, 4, 4))
    with mode():
        with pytest.raises(LayoutError, match="state must hold its own values"):
            flashvar.causal_conv1d_update(torch.randn(2, 6), negated, torch.randn(6, 4))
        with pytest.raises(LayoutError, match="initial_state must hold its own values"):
            flashvar.gated_delta_rule(
                *(rows, rows, rows, None, rows[..., 0].sigmoid()),
                initial_state=pool,
                state_indices=torch.tensor([1, 0]),
            )
