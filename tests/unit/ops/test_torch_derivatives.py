"""Derivatives of attention through transforms at any depth: right, or refused in words.

Every chain of up to three transforms is compared with that of attention written out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from derivative_chains import (
    AUTOGRAD,
    FUNCTORCH,
    OF_REFUSED,
    PAIRS,
    TANGENT,
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
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import flashvar
from flashvar.errors import BackendUnavailableError

Attention = Callable[..., torch.Tensor]

SECOND = r"first derivatives only.*MATH"
FORWARD = r"no forward-mode derivative.*MATH"
# Torch's own, of its forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

MASK = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]], dtype=torch.float64)


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """A function of all inputs with both outputs of attention in it."""
    out, lse = flashvar.attention(q, k, v, bias=bias_of(z), causal=True, return_lse=True)
    lse = lse.transpose(1, 2).unsqueeze(-1)
    return torch.stack([out, out + lse, out * z, lse * q])


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 + bias_of(z) + MASK
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    lse = scores.logsumexp(-1).transpose(1, 2).unsqueeze(-1)
    return torch.stack([out, out + lse, out * z, lse * q])


def bias_of(z: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bihd,bjhd->bhij", z, 1 - z)


def compared(chain: Chain, found: Function, expected: Function) -> None:
    check(chain, found, expected, f"{SECOND}|{FORWARD}")


def whole(attend: Attention) -> Function:
    return lambda x: attend(*x)


def alone(attend: Attention, place: int) -> Function:
    """A function of one input; the others are constants."""
    return lambda x: attend(*X[:place], x[place], *X[place + 1 :])


@pytest.mark.filterwarnings("ignore:There is a performance drop.*aten:UserWarning")
@pytest.mark.parametrize("outermost", [*FUNCTORCH, *AUTOGRAD], ids=lambda one: one.__name__)
def test_chains(outermost: Callable[[Function], Function]) -> None:
    mine = [chain for chain in chains() if chain[0] is outermost]
    assert mine
    assert wrong(mine, whole(fused), whole(written_out), f"{SECOND}|{FORWARD}") == {}


@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "bias"])
def test_chains_of_one_input(place: int) -> None:
    found = wrong(PAIRS, alone(fused, place), alone(written_out, place), f"{SECOND}|{FORWARD}")
    assert found == {}


# A compilation takes seconds: one of each kind. A forward-mode and a second derivative, which are
# refused when the program runs, a batch, and a second derivative that nobody asks for.
# test_compiled_gradients_of_parameters has the plain gradient.
COMPILED = [(jvp,), (vmap, jacrev), (grad, grad), (vjp_unused, vjp)]


@pytest.mark.parametrize("chain", COMPILED, ids=name)
def test_compiled_chains(chain: Chain) -> None:
    torch._dynamo.reset()
    found = torch.compile(composed(chain, whole(fused)), fullgraph=True, backend="aot_eager")
    compared(chain, found, composed(chain, whole(written_out)))


@pytest.mark.parametrize("chain", OF_REFUSED, ids=name)
def test_compiled_derivatives_of_refused_ones(chain: Chain) -> None:
    def of_one_input(x: torch.Tensor) -> torch.Tensor:
        return flashvar.attention(x[0], X[0], X[1]).expand(x.shape)

    check_compiled_derivatives_of_refused(chain, of_one_input, f"{SECOND}|{FORWARD}")


def test_compiled_gradients_of_parameters() -> None:
    check_compiled_gradients(whole(fused), whole(written_out), SECOND)


@pytest.mark.parametrize("within", [torch.enable_grad, torch.no_grad])
def test_vjp_after_its_transform(within: type) -> None:
    check_vjp_after_its_transform(within, whole(fused), whole(written_out), SECOND)


def test_linearize_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match=FORWARD):
        torch.func.linearize(whole(fused), X)[1](TANGENT)


def test_constants_in_forward_mode_are_served() -> None:
    q = X[0]

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x * flashvar.attention(q, q, q)

    found = torch.func.jvp(shifted, (q,), (q,))
    expected = q * flashvar.attention(q, q, q)
    torch.testing.assert_close(found, (expected, expected))


def test_a_tangent_that_reaches_the_backward_is_refused() -> None:
    leaf = X.clone().requires_grad_()
    out = whole(fused)(leaf)
    with forward_ad.dual_level(), pytest.raises(BackendUnavailableError, match=FORWARD):
        torch.autograd.grad(out, leaf, forward_ad.make_dual(TANGENT, TANGENT))


@pytest.mark.parametrize("ask", ["hessian", "hvp", "vhp", "jvp"])
def test_autograd_functional(ask: str) -> None:
    from torch.autograd import functional

    attend = whole(fused)
    vector = () if ask == "hessian" else (TANGENT,)
    with pytest.raises(BackendUnavailableError, match=SECOND):
        getattr(functional, ask)(
            attend if ask == "jvp" else lambda x: attend(x).square().sum(), X, *vector
        )
    found = functional.vjp(attend, X, TANGENT)
    torch.testing.assert_close(found, functional.vjp(whole(written_out), X, TANGENT))


def test_second_derivatives_that_nobody_asks_for() -> None:
    check_unused_second_derivatives(whole(fused), SECOND)


def checkpointed(f: Function) -> Function:
    return lambda x: checkpoint(f, x, use_reentrant=False)


def saved_elsewhere(f: Function) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda tensor: [tensor.clone()], lambda packed: packed[0]):
            return f(x)

    return function


@pytest.mark.parametrize("way", [checkpointed, saved_elsewhere])
@pytest.mark.parametrize("chain", [(autograd,), (batched,), (jacobian,)], ids=name)
def test_gradients_of_what_was_kept_otherwise(chain: Chain, way: Callable[..., Function]) -> None:
    compared(chain, composed(chain, way(whole(fused))), composed(chain, whole(written_out)))
