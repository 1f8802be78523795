"""Gradients of rotary embeddings, in place and not, compiled and under torch's transforms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashvar.compat.flash_attn.layers.rotary import (
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from flashvar.compat.flash_attn.ops.triton.rotary import apply_rotary
from flashvar.errors import InvalidInputError, ShapeError

# Torch's own, of its compiler and its transforms.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)

ANGLES = torch.linspace(0, 6, 18, dtype=torch.float64).view(9, 2)
COS, SIN = ANGLES.cos(), ANGLES.sin()
# Not made inside of a transform, which would wrap them: their values are checked.
BEGINS, ENDS = torch.tensor([1, 4]), torch.tensor([0, 2, 5])
BOTH = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def leaf(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


def own(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    return apply_rotary_emb_torch(x, COS[:3], SIN[:3], interleaved)


def in_place(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    return apply_rotary_emb(x, COS, SIN, interleaved, inplace=True)


# Functions of [2, 3, 6, 4].
FORMS: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "new": lambda x, i: apply_rotary_emb(x, COS, SIN, i),
    "back": lambda x, i: apply_rotary(x, COS, SIN, 2, interleaved=i, conjugate=True),
    "offsets": lambda x, i: apply_rotary_emb(x, COS, SIN, i, False, BEGINS),
    "packed": lambda x, i: apply_rotary_emb(
        x.flatten(0, 1), COS, SIN, i, cu_seqlens=ENDS, max_seqlen=3
    ),
    "in place": lambda x, i: in_place(x * 1, i),
    "in a view": lambda x, i: in_place((x * 1)[:, :, 1:4], i),
    "qkv": lambda x, i: apply_rotary_emb_qkv_(
        (x * 1).unflatten(2, (3, 2)), COS, SIN, interleaved=i
    ),
    "groups, keys of their own": lambda x, i: apply_rotary_emb_qkv_(
        x * 1, COS, SIN, SIN, COS, i, num_heads_q=2
    ),
    "kv": lambda x, i: apply_rotary_emb_kv_((x * 1).unflatten(2, (2, 3)), COS, SIN, i),
}


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_first_and_second_derivatives(form: str, interleaved: bool) -> None:
    function = FORMS[form]
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(
            lambda x: function(x, interleaved),
            leaf(2, 3, 6, 4),
            fast_mode=True,
            check_batched_grad=check is torch.autograd.gradcheck,
        )


def test_tables_have_gradients_too() -> None:
    tables = [table.clone().requires_grad_() for table in (COS, SIN)]
    x = leaf(1, 3, 2, 4)
    for inplace in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, c, s, inplace=inplace: apply_rotary_emb(x * 1, c, s, inplace=inplace),
            (x, *tables),
        )


@pytest.mark.parametrize("inplace", [False, True])
def test_positions_beyond_tables_with_gradients_are_said(inplace: bool) -> None:
    cos, sin = COS.clone().requires_grad_(), SIN.clone().requires_grad_()
    x, offsets = torch.randn(2, 3, 6, 4, dtype=torch.float64), torch.tensor([0, 7])
    with pytest.raises(ShapeError, match="9 positions and a row at 9"):
        apply_rotary_emb(x, cos, sin, False, inplace, offsets)


def test_a_gradient_that_is_passed_on_is_not_written_to() -> None:
    """It may be somebody else's as well, or one number that is expanded."""
    for x in (leaf(2, 3, 6, 4), leaf(2, 3, 3, 2, 4)):
        turn = in_place if x.dim() == 4 else lambda x: apply_rotary_emb_qkv_(x, COS, SIN)
        given = torch.ones_like(x)
        turn(x * 1).backward(given)
        assert torch.equal(given, torch.ones_like(x))
        summed = leaf(*x.shape)
        turn(summed * 1).sum().backward()
        torch.testing.assert_close(summed.grad, x.grad)


def test_who_reads_x_afterwards_sees_the_turned_one() -> None:
    x = leaf(2, 3, 6, 4)
    y = x * 2
    out = in_place(y)
    assert out is y
    (found,) = torch.autograd.grad(y.square().sum() + out.sum(), x)
    expected = own(x * 2)
    (right,) = torch.autograd.grad(expected.square().sum() + expected.sum(), x)
    torch.testing.assert_close(found, right)


def test_who_kept_x_for_its_backward_is_told() -> None:
    y = leaf(2, 3, 6, 4).exp()
    out = in_place(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_leaf_and_its_views_are_turned_in_place() -> None:
    """torch refuses it; FlashAttention does it, and its tests."""
    for take in (lambda x: x, lambda x: x[:, :, 1:4]):
        x = leaf(2, 3, 6, 4)
        before = x.detach().clone()
        out = in_place(take(x))
        expected = own(take(before))
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(take(x), expected)
        (found,) = torch.autograd.grad(out.square().sum(), x)
        (right,) = torch.autograd.grad(own(take(y := before.requires_grad_())).square().sum(), y)
        torch.testing.assert_close(found, right)


def test_each_of_several_views() -> None:
    x = leaf(2, 3, 3, 2, 4)
    q, k, v = (x * 1).unbind(2)
    found = in_place(q), in_place(k)
    torch.testing.assert_close(q.detach(), found[0].detach())
    (grad,) = torch.autograd.grad(found[0].square().sum() + (found[1] * v).sum(), x)
    q, k, v = x.unbind(2)
    (right,) = torch.autograd.grad(own(q).square().sum() + (own(k) * v).sum(), x)
    torch.testing.assert_close(grad, right)


@pytest.mark.parametrize("kinds", [False, True], ids=["one tensor", "keys and values"])
def test_several_views_leave_their_base_to_who_kept_it(kinds: bool) -> None:
    """Its maker, for example; and who reads the views afterwards sees the turned ones."""

    def keys_and_values(x: torch.Tensor) -> torch.Tensor:
        return apply_rotary_emb_kv_(x, COS, SIN)

    def own_of_keys(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((own(x[:, :, 0]), x[:, :, 1]), 2)

    x = leaf(2, 2, 3, 2, 2, 4) if kinds else leaf(2, 2, 3, 6, 4)
    turn, right = (keys_and_values, own_of_keys) if kinds else (in_place, own)
    first, second = x.tanh().unbind(0)
    assert turn(first) is first
    turn(second)
    value = (first * second).sum() + first.pow(3).sum()
    first, second = map(right, x.tanh().unbind(0))
    expected = (first * second).sum() + first.pow(3).sum()
    torch.testing.assert_close(value, expected)
    (grad,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x)[0])


def test_who_kept_one_of_several_views_is_told() -> None:
    first, second = leaf(2, 2, 3, 6, 4).tanh().unbind(0)
    kept = first.pow(3)
    with pytest.raises(InvalidInputError, match=r"must not be kept .* pass inplace=False"):
        in_place(first)
    in_place(second)
    kept.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    with mode():
        x = torch.randn(2, 3, 6, 4, dtype=torch.float64)
        before = x.clone()
        assert in_place(x) is x
        torch.testing.assert_close(x, own(before))


def test_transforms() -> None:
    x, tangent = leaf(4, 2, 3, 6, 4).detach(), torch.randn(2, 3, 6, 4, dtype=torch.float64)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return apply_rotary_emb(x, COS, SIN)

    expected = torch.stack([own(one) for one in x])
    torch.testing.assert_close(torch.func.vmap(turn)(x), expected)
    torch.testing.assert_close(torch.func.jvp(turn, (x[0],), (tangent,))[1], own(tangent))
    found = torch.func.grad(lambda x: turn(x).pow(3).sum())(x[0])
    torch.testing.assert_close(found, torch.func.grad(lambda x: own(x).pow(3).sum())(x[0]))
    nested = torch.func.grad(
        lambda x: torch.func.vjp(lambda y: turn(y).pow(3), x)[1](tangent)[0].square().sum()
    )
    right = torch.func.grad(
        lambda x: torch.func.vjp(lambda y: own(y).pow(3), x)[1](tangent)[0].square().sum()
    )
    torch.testing.assert_close(nested(x[0]), right(x[0]))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[0], tangent)
        found = torch.autograd.forward_ad.unpack_dual(turn(dual)).tangent
    torch.testing.assert_close(found, own(tangent))


@pytest.mark.parametrize("form", ["new", "back", "offsets", "packed"])
def test_torch_func_finds_the_gradients_of_autograd(form: str) -> None:
    x = leaf(2, 3, 6, 4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return FORMS[form](x, False).pow(3).sum()

    torch.testing.assert_close(
        torch.func.grad(loss)(x.detach()), torch.autograd.grad(loss(x), x)[0]
    )


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in place"])
def test_compiled_transforms(inplace: bool) -> None:
    def ours(x: torch.Tensor) -> torch.Tensor:
        return apply_rotary_emb(x.sin(), COS, SIN, inplace=inplace).sin()

    def tangent(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return lambda x: torch.func.jvp(torch.func.grad(lambda y: function(y).sum()), (x,), (x,))

    x = leaf(2, 3, 2, 4).detach()
    torch._dynamo.reset()
    found = torch.compile(tangent(ours), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, tangent(lambda y: own(y.sin()).sin())(x))


class Turning(torch.nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return apply_rotary_emb(x * 1, cos, sin, inplace=self.inplace)


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in place"])
def test_an_exported_program_has_the_derivatives_of_the_function(inplace: bool) -> None:
    """It was traced without tangents, and without gradients."""
    given = leaf(2, 3, 2, 4), COS[:3].clone().requires_grad_(), SIN[:3].clone().requires_grad_()
    with torch.no_grad():
        plain = tuple(x.detach() for x in given)
        program = torch.export.export(Turning(inplace), plain).module()
    rotated = program(*given)
    wanted = apply_rotary_emb_torch(*given)
    torch.testing.assert_close(rotated, wanted)
    weights = torch.randn_like(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(rotated.sin(), given, weights),
        torch.autograd.grad(wanted.sin(), given, weights),
    )
    tangents = tuple(torch.randn_like(x) for x in plain)
    found = torch.func.jvp(program, plain, tangents)[1]
    torch.testing.assert_close(found, torch.func.jvp(apply_rotary_emb_torch, plain, tangents)[1])


def reused(y: torch.Tensor) -> torch.Tensor:
    """x is read again, rather than what is returned."""
    in_place(y)
    return y.square().sum()


def of_views(y: torch.Tensor) -> torch.Tensor:
    q, k, v = y.unflatten(2, (3, 2)).unbind(2)
    return (apply_rotary_emb(q, COS, SIN) * k + v).sum()


def new(y: torch.Tensor) -> torch.Tensor:
    return apply_rotary_emb(y, COS, SIN, True, False, torch.tensor([1, 2])).square().sum()


def turned(y: torch.Tensor) -> torch.Tensor:
    return in_place(y).pow(3).sum()


def turned_qkv(y: torch.Tensor) -> torch.Tensor:
    return apply_rotary_emb_qkv_(y, COS, SIN, num_heads_q=2).pow(3).sum()


# Who made a tensor matters where it is turned in place. A leaf that is has its gradient in the
# result alone, so `reused` is not called with one.
@pytest.mark.parametrize(
    ("function", "made_by"),
    [
        (new, "a leaf"),
        *((turned, made_by) for made_by in ("a leaf", "before", "inside")),
        *((function, by) for function in (turned_qkv, reused) for by in ("before", "inside")),
        (of_views, "before"),
    ],
)
def test_compiled(function: Callable[[torch.Tensor], torch.Tensor], made_by: str) -> None:
    start = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    program = (lambda x: function(x * 2)) if made_by == "inside" else function
    torch._dynamo.reset()
    results = []
    for call in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        x = start.clone().requires_grad_()
        value = call(x * 2 if made_by == "before" else x)
        results.append((value.detach(), *torch.autograd.grad(value, x)))
    torch.testing.assert_close(results[0], results[1])


def test_inductor_compiles_rotations_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It traces an op in place, then the trace, and takes no second trace that is longer."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # a program there is not traced
    x = torch.randn(2, 3, 6, 4)
    wanted = in_place(x.clone())
    torch._dynamo.reset()
    assert torch.compile(in_place, fullgraph=True)(x) is x
    torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
def test_the_input_of_a_checkpoint_is_not_rotated_twice(view: bool) -> None:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        return in_place(x[:, :2] if view else x).square()

    def of_a_copy(x: torch.Tensor) -> torch.Tensor:
        return rotated(x.clone())

    start = torch.randn(2, 3, 6, 4, dtype=torch.float64, requires_grad=True)
    found = [checkpoint(f, start * 2, use_reentrant=True) for f in (of_a_copy, rotated)]
    expected = torch.autograd.grad(of_a_copy(start * 2).sum(), start)
    found[0].sum().backward()
    torch.testing.assert_close(start.grad, *expected)
    with pytest.raises(InvalidInputError, match="not be an input of a checkpointed function"):
        found[1].sum().backward()
