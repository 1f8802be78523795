"""Derivatives of attention through transforms at any depth: right, or refused in words.

Every chain of up to three transforms is compared with that of attention written out. One derivative
in reverse mode has to be right, wherever it is; a second one, and any in forward mode, is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import flashvar
from flashvar.errors import BackendUnavailableError

Function = Callable[[torch.Tensor], torch.Tensor]
Attention = Callable[..., torch.Tensor]

SECOND = r"first derivatives only.*MATH"
FORWARD = r"no forward-mode derivative.*MATH"
# Torch's own, of its forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

SHAPE = (4, 1, 2, 1, 2)  # q, k, v and what the bias is made of
X, TANGENT = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(2))
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


def whole(attend: Attention) -> Function:
    return lambda x: attend(*x)


def alone(attend: Attention, place: int) -> Function:
    """A function of one input; the others are constants."""
    return lambda x: attend(*X[:place], x[place], *X[place + 1 :])


def grad(f: Function) -> Function:
    return torch.func.grad(lambda x: f(x).square().sum())


def vjp(f: Function) -> Function:
    return lambda x: torch.func.vjp(f, x)[1](TANGENT)[0]


def vjp_unused(f: Function) -> Function:
    return lambda x: torch.func.vjp(f, x)[0]


def jvp(f: Function) -> Function:
    return lambda x: torch.func.jvp(f, (x,), (TANGENT,))[1]


def vmap(f: Function) -> Function:
    return lambda x: torch.vmap(f)(torch.stack([x, TANGENT - x])).sum(0)


def jacrev(f: Function) -> Function:
    return lambda x: torch.einsum("abcdevwxyz,abcde->vwxyz", torch.func.jacrev(f)(x), TANGENT)


def jacfwd(f: Function) -> Function:
    return lambda x: torch.einsum("abcdevwxyz,abcde->vwxyz", torch.func.jacfwd(f)(x), TANGENT)


def functionalize(f: Function) -> Function:
    return torch.func.functionalize(f)


def autograd(f: Function) -> Function:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)[0]

    return gradient


def batched(f: Function) -> Function:
    def gradients(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        several = torch.stack([TANGENT, 2 * TANGENT])
        return torch.autograd.grad(f(leaf), leaf, several, is_grads_batched=True)[0].sum(0)

    return gradients


def jacobian(f: Function) -> Function:
    return lambda x: torch.einsum(
        "abcdevwxyz,abcde->vwxyz",
        torch.autograd.functional.jacobian(f, x, vectorize=True),
        TANGENT,
    )


def dual(f: Function) -> Function:
    def tangent(x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            answer = forward_ad.unpack_dual(f(forward_ad.make_dual(x, TANGENT))).tangent
            return torch.zeros_like(x) if answer is None else answer

    return tangent


FUNCTORCH = [grad, vjp, vjp_unused, jvp, vmap, jacrev, jacfwd, functionalize]
# Outermost: they differentiate tensors, not functions.
AUTOGRAD = [autograd, batched, jacobian, dual]
REVERSE = {grad, vjp, jacrev, autograd, batched, jacobian}
IN_FORWARD_MODE = {jvp, jacfwd, dual}
Chain = tuple[Callable[[Function], Function], ...]


PAIRS = [chain for depth in (1, 2) for chain in itertools.product(FUNCTORCH[:-1], repeat=depth)]
# What torch itself cannot do; jvp and jacfwd are dual levels of their own.
IMPOSSIBLE = [{dual, jvp}, {dual, jacfwd}]


def chains() -> Iterator[Chain]:
    for depth in (1, 2, 3):
        yield from itertools.product(FUNCTORCH, repeat=depth)
        yield from itertools.product(AUTOGRAD, *[FUNCTORCH] * (depth - 1))


def possible(chain: Chain) -> bool:
    return chain.count(functionalize) < 2 and not any(pair <= set(chain) for pair in IMPOSSIBLE)


def composed(chain: Chain, function: Function) -> Function:
    for transform in reversed(chain):
        function = transform(function)
    return function


def name(chain: Chain) -> str:
    return "-".join(transform.__name__ for transform in chain)


def check(chain: Chain, found: Function, expected: Function) -> None:
    """Right, or refused."""
    reverse = sum(transform in REVERSE for transform in chain)
    if reverse > 1 or IN_FORWARD_MODE.intersection(chain):
        with pytest.raises(BackendUnavailableError, match=f"{SECOND}|{FORWARD}"):
            found(X)
    else:
        torch.testing.assert_close(found(X), expected(X))


def wrong(chains: list[Chain], function: Function, expected: Function) -> dict[str, str]:
    """What is wrong with chains of a function, by their names."""
    found = {}
    for chain in chains:
        try:
            check(chain, composed(chain, function), composed(chain, expected))
        except (Exception, pytest.fail.Exception) as error:
            found[name(chain)] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.filterwarnings("ignore:There is a performance drop.*aten:UserWarning")
@pytest.mark.parametrize("outermost", [*FUNCTORCH, *AUTOGRAD], ids=lambda one: one.__name__)
def test_chains(outermost: Callable[[Function], Function]) -> None:
    mine = [chain for chain in chains() if chain[0] is outermost and possible(chain)]
    assert mine
    assert wrong(mine, whole(fused), whole(written_out)) == {}


@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "bias"])
def test_chains_of_one_input(place: int) -> None:
    assert wrong(PAIRS, alone(fused, place), alone(written_out, place)) == {}


# A compilation takes a second: one of each kind. What is refused is so when the program runs.
COMPILED = [
    (grad,),
    (jvp,),
    (jacfwd,),
    (grad, vmap),
    (vmap, jacrev),
    (vjp_unused, vjp),
    (grad, grad),
    (vmap, jvp),
    (jvp, grad),
    (jacrev, jacrev),
]


@pytest.mark.parametrize("chain", COMPILED, ids=name)
def test_compiled_chains(chain: Chain) -> None:
    torch._dynamo.reset()
    found = torch.compile(composed(chain, whole(fused)), fullgraph=True, backend="aot_eager")
    check(chain, found, composed(chain, whole(written_out)))


def test_compiled_gradients_of_parameters() -> None:
    """The graph has the second derivative in it, which is refused where it is asked for."""
    parameter = X.clone().requires_grad_()
    found = torch.compile(grad(whole(fused)), fullgraph=True, backend="aot_eager")(parameter)
    torch.testing.assert_close(found, grad(whole(written_out))(X))
    with pytest.raises(BackendUnavailableError, match=SECOND):
        found.sum().backward()


@pytest.mark.parametrize("within", [torch.enable_grad, torch.no_grad])
def test_vjp_after_its_transform(within: type) -> None:
    (expected,) = torch.func.vjp(whole(written_out), X)[1](TANGENT)
    _, pull = torch.func.vjp(whole(fused), X)
    with within():
        (found,) = pull(TANGENT)
    torch.testing.assert_close(found, expected)
    (mapped,) = torch.vmap(pull)(torch.stack([TANGENT, 2 * TANGENT]))
    torch.testing.assert_close(mapped, torch.stack([expected, 2 * expected]))
    with pytest.raises(BackendUnavailableError, match=SECOND):
        torch.func.grad(lambda tangent: pull(tangent)[0].sum())(TANGENT)


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


def test_unused_second_derivatives_are_not_asked() -> None:
    leaf = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(whole(fused)(leaf).sum(), leaf, create_graph=True)
    (found,) = torch.autograd.grad((leaf.square() + first.detach()).sum(), leaf)
    torch.testing.assert_close(found, 2 * leaf.detach())
    with pytest.raises(BackendUnavailableError, match=SECOND):
        first.sum().backward()


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
    check(chain, composed(chain, way(whole(fused))), composed(chain, whole(written_out)))
