"""Derivatives of gated_delta_rule through transforms at any depth: right, or refused in words.

Chains of transforms are compared with those of the recurrence in torch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from derivative_chains import (
    OF_REFUSED,
    PAIRS,
    Chain,
    Function,
    X,
    autograd,
    batched,
    chains,
    check,
    check_compiled_derivatives_of_refused,
    check_compiled_gradients,
    check_unused_second_derivatives,
    check_vjp_after_its_transform,
    composed,
    functionalize,
    grad,
    jacobian,
    jacrev,
    jvp,
    name,
    vjp,
    vjp_unused,
    vmap,
    wrong,
)
from gated_delta_rule_calls import made, positional
from gated_delta_rule_oracle import recurrent
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flashvar
from flashvar.errors import BackendUnavailableError, InvalidInputError
from flashvar.ops.gated_delta_rule.torch_library import (
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    gated_delta_rule_update,
)

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]

SECOND = "gated_delta_rule has first derivatives only"
FORWARD = "gated_delta_rule has no forward-mode derivative"
# Torch's own, of its forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
ENDS = torch.tensor([0, 0, 1, 2])


def ours(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, final = flashvar.gated_delta_rule(*tensors, return_final_state=True, **options)
    assert final is not None
    return out, final


def plain(rule: Rule) -> Function:
    """A function of every tensor, and of both results; `x` is q, k, v and what makes the others."""

    def function(x: torch.Tensor) -> torch.Tensor:
        q, k, v, z = x
        state = z[:, 0, :, :, None] * v[:, 1, :, None]
        gates = -z.square().sum(-1), z.sum(-1).sigmoid()
        out, final = rule(q, k, v, *gates, initial_state=state, scale=0.7)
        final = final.transpose(1, 2)
        return torch.stack([out, out + final, out * z, final * q])

    return function


def fused(rule: Rule) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        q, k, v, z = x
        out, final = rule(
            *(q, k, v, *z.unbind(-1)),
            A_log=z[0, 0, :, 0],
            dt_bias=z[0, 1, :, 1],
            qk_l2norm=True,
            beta_sigmoid=True,
            allow_neg_eigval=True,
        )
        return torch.stack([out, out.exp(), out * z, final.transpose(1, 2)])

    return function


def packed(rule: Rule) -> Function:
    """Of several heads, and sequences that share their offsets."""

    def function(x: torch.Tensor) -> torch.Tensor:
        q, k, v, z = (one.repeat(1, 1, 2, 1) for one in x)
        k, v = k.roll(1, 1), torch.cat((v, 2 * v, v * z, z), 2)
        gates = -v.square().sum(-1), v.sum(-1).sigmoid()
        out, final = rule(q, k, v, *gates, cu_seqlens=ENDS)
        sums = out.unflatten(2, (2, 4)).sum(3)[:, :, :1], final.sum((0, 1))[None, :, None]
        return torch.stack([sums[0], sums[1], sums[0] * x[0], sums[0].sin()])

    return function


def alone(function: Function, place: int) -> Function:
    """A function of one part of its argument; the others are constants."""
    return lambda x: function(torch.stack([*X[:place], x[place], *X[place + 1 :]]))


def one_tensor(rule: Rule, place: int) -> Function:
    """A function of one tensor of the call; the others are constants."""

    def function(x: torch.Tensor) -> torch.Tensor:
        given = [X[0], X[1], X[2], -X[3].square().sum(-1), X[3].sum(-1).sigmoid()]
        given[place] = x[place] if place < 3 else -x[3].square().sum(-1)
        out, final = rule(*given)
        return torch.stack([out, out.exp(), out * X[3], final.transpose(1, 2)])

    return function


def compared(chain: Chain, of: Callable[[Rule], Function]) -> None:
    assert faults([chain], of) == {}


def faults(chains: Iterable[Chain], of: Callable[[Rule], Function]) -> dict[str, str]:
    """Which chains of a function are wrong, and how."""
    return wrong(chains, of(ours), of(recurrent), f"{SECOND}|{FORWARD}")


WHOLE = [*chains((1, 2)), (vmap, vmap, grad), (grad, vmap, vmap), (vmap, grad, functionalize)]
REFUSED = [(grad, vmap, grad), (vjp_unused, vjp, vjp), (vmap, jvp, grad), (jacobian, vmap, jvp)]


@pytest.mark.parametrize("of", [plain, fused, packed])
def test_chains(of: Callable[[Rule], Function]) -> None:
    assert faults([*WHOLE, *REFUSED], of) == {}


@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "g"])
def test_chains_of_one_tensor(place: int) -> None:
    mapped = [one for one in PAIRS if len(one) == 1 or vmap in one]
    assert faults(mapped, lambda rule: one_tensor(rule, place)) == {}


# A compilation takes seconds: one of each kind. A forward-mode and a second derivative, which are
# refused when the program runs, a batch, and a second derivative that nobody asks for.
# test_compiled_gradients_of_parameters has the plain gradient.
COMPILED = [(jvp,), (vmap, jacrev), (grad, grad), (vjp_unused, vjp)]


@pytest.mark.parametrize("chain", COMPILED, ids=name)
def test_compiled_chains(chain: Chain) -> None:
    torch._dynamo.reset()
    found = torch.compile(composed(chain, plain(ours)), fullgraph=True, backend="aot_eager")
    check(chain, found, composed(chain, plain(recurrent)), f"{SECOND}|{FORWARD}")


@pytest.mark.parametrize("chain", OF_REFUSED, ids=name)
def test_compiled_derivatives_of_refused_ones(chain: Chain) -> None:
    def of_one_tensor(x: torch.Tensor) -> torch.Tensor:
        beta = torch.full(x.shape[1:4], 0.5, dtype=x.dtype)
        return flashvar.gated_delta_rule(x[0], *X[:2], None, beta)[0].expand(x.shape)

    check_compiled_derivatives_of_refused(chain, of_one_tensor, f"{SECOND}|{FORWARD}")


def test_compiled_gradients_of_parameters() -> None:
    check_compiled_gradients(plain(ours), plain(recurrent), SECOND)


@pytest.mark.parametrize("within", [torch.enable_grad, torch.no_grad])
def test_vjp_after_its_transform(within: type) -> None:
    check_vjp_after_its_transform(within, plain(ours), plain(recurrent), SECOND)


@pytest.mark.parametrize("chain", [(autograd,), (batched,), (jacobian,)], ids=name)
def test_gradients_of_what_is_computed_again(chain: Chain) -> None:
    def kept(rule: Rule) -> Function:
        return lambda x: checkpoint(plain(rule), x, use_reentrant=False)

    compared(chain, kept)


def test_repeated_calls_under_batched_gradients() -> None:
    """The second call of a kind skips the dispatcher."""
    for _ in range(2):
        compared((batched,), plain)
        compared((autograd, grad), plain)


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0, 0), (1, None, 2, None, 0), (None,) * 4 + (2,)])
@pytest.mark.parametrize("ends", [None, (0, 2, 2, 5)], ids=["dense", "packed"])
def test_vmap_of_groups_of_heads(
    in_dims: tuple[int | None, ...], ends: tuple[int, ...] | None
) -> None:
    """Each entry is a call of its own; in_dims are those of q, k, v, g and beta."""
    calls = [
        made(heads=(2, 4), **({"seqlen": 5} if ends is None else {"packed": (2, 0, 3)}))
        for _ in range(3)
    ]
    names = ("q", "k", "v", "g", "beta")
    rest = {n: x for n, x in calls[0].items() if n not in names}

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        out, final = ours(*tensors, **rest)
        return torch.cat((out.flatten(), final.flatten()))

    mapped = [
        calls[0][n] if dim is None else torch.stack([one[n] for one in calls], dim)
        for n, dim in zip(names, in_dims, strict=True)
    ]
    expected = [
        call(*(calls[0 if dim is None else i][n] for n, dim in zip(names, in_dims, strict=True)))
        for i in range(3)
    ]
    torch.testing.assert_close(torch.vmap(call, in_dims)(*mapped), torch.stack(expected))


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0, 0), (2, None, None, None, None)])
def test_vmap_of_no_entries(in_dims: tuple[int | None, ...]) -> None:
    names = ("q", "k", "v", "g", "beta")
    given = made(heads=(2, 4))
    tensors = [given[name] for name in names]
    none = tuple(
        x if dim is None else x.new_zeros(*x.shape[:dim], 0, *x.shape[dim:])
        for x, dim in zip(tensors, in_dims, strict=True)
    )

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        out, final = ours(*tensors, **{n: x for n, x in given.items() if n not in names})
        return out.sum() + final.sum()

    found = torch.vmap(torch.func.grad(loss, (0, 1, 2, 3, 4)), in_dims)(*none)
    assert [x.shape for x in found] == [(0, *x.shape) for x in tensors]


def test_offsets_are_not_mapped() -> None:
    given = made(packed=(2, 3), state=False)
    ends = given.pop("cu_seqlens")
    with pytest.raises(InvalidInputError, match="cu_seqlens must be the same"):
        torch.vmap(lambda one: ours(**given, cu_seqlens=one))(torch.stack([ends, ends]))


def test_updates_are_not_mapped() -> None:
    given = made(seqlen=1)
    pools = given.pop("initial_state").expand(3, -1, -1, -1, -1).clone()
    with pytest.raises(InvalidInputError, match="sequences in the batch"):
        torch.vmap(
            lambda pool: flashvar.gated_delta_rule(
                **given, initial_state=pool, state_indices=torch.tensor([0, 1])
            )[0]
        )(pools)


def test_tangents_of_the_op_itself_are_refused() -> None:
    given = made(seqlen=3)
    state, arguments = given["initial_state"], positional(given)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given["q"], torch.ones_like(given["q"]))
        with pytest.raises(BackendUnavailableError, match=FORWARD):
            gated_delta_rule_fwd(state, dual, *arguments[1:])
        with pytest.raises(BackendUnavailableError, match=FORWARD):
            gated_delta_rule_bwd(given["v"], None, state, dual, *arguments[1:])
        with pytest.raises(BackendUnavailableError, match="update has no derivatives"):
            gated_delta_rule_update(state, torch.tensor([0, 1]), dual, *arguments[1:])
        pool = forward_ad.make_dual(state.clone(), torch.ones_like(state))
        with pytest.raises(BackendUnavailableError, match="update has no derivatives"):
            gated_delta_rule_update(pool, torch.tensor([0, 1]), *arguments)


def test_gradients_of_the_update_itself_are_refused() -> None:
    given = made(seqlen=3)
    state, arguments = given["initial_state"], positional(given)
    leaf = given["q"].clone().requires_grad_()
    out = gated_delta_rule_update(state, torch.tensor([0, 1]), leaf, *arguments[1:])
    with pytest.raises(BackendUnavailableError, match="update has no derivatives"):
        out.sum().backward()
    with pytest.raises(InvalidInputError, match="states must not require a gradient"):
        gated_delta_rule_update(state.clone().requires_grad_(), torch.tensor([0, 1]), *arguments)


def test_constants_in_forward_mode_are_served() -> None:
    given = made(seqlen=3)
    expected = ours(**given)[0]
    found = torch.func.jvp(lambda x: x * ours(**given)[0], (expected,), (expected,))
    torch.testing.assert_close(found, (expected.square(), expected.square()))


def test_second_derivatives_that_nobody_asks_for() -> None:
    check_unused_second_derivatives(plain(ours), SECOND)
