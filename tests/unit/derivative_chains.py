"""Chains of torch's transforms, and what a function with first derivatives owes to each.

One derivative in reverse mode has to be right, wherever it is; a second one, and any in forward
mode, is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch.autograd import forward_ad

from flashvar.errors import BackendUnavailableError

Function = Callable[[torch.Tensor], torch.Tensor]

SHAPE = (4, 1, 2, 1, 2)  # of the argument and of the result
X, TANGENT = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(2))


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


def chains(depths: Iterable[int] = (1, 2, 3)) -> Iterator[Chain]:
    """Every chain of so many transforms that torch itself can do."""
    for depth in depths:
        yield from filter(_possible, itertools.product(FUNCTORCH, repeat=depth))
        yield from filter(_possible, itertools.product(AUTOGRAD, *[FUNCTORCH] * (depth - 1)))


def _possible(chain: Chain) -> bool:
    return chain.count(functionalize) < 2 and not any(pair <= set(chain) for pair in IMPOSSIBLE)


def composed(chain: Chain, function: Function) -> Function:
    for transform in reversed(chain):
        function = transform(function)
    return function


def name(chain: Chain) -> str:
    return "-".join(transform.__name__ for transform in chain)


def check(chain: Chain, found: Function, expected: Function, refusal: str) -> None:
    """Right, or refused in words that match `refusal`."""
    reverse = sum(transform in REVERSE for transform in chain)
    if reverse > 1 or IN_FORWARD_MODE.intersection(chain):
        with pytest.raises(BackendUnavailableError, match=refusal):
            found(X)
    else:
        torch.testing.assert_close(found(X), expected(X))


def wrong(
    chains: Iterable[Chain], function: Function, expected: Function, refusal: str
) -> dict[str, str]:
    """What `check` finds wrong with chains of a function, by their names."""
    found = {}
    for chain in chains:
        try:
            check(chain, composed(chain, function), composed(chain, expected), refusal)
        except (Exception, pytest.fail.Exception) as error:
            found[name(chain)] = f"{type(error).__name__}: {error}"
    return found


def check_compiled_gradients(found: Function, expected: Function, refusal: str) -> None:
    """The graph has the second derivative in it, which is refused where it is asked for."""
    torch._dynamo.reset()
    parameter = X.clone().requires_grad_()
    gradient = torch.compile(grad(found), fullgraph=True, backend="aot_eager")(parameter)
    torch.testing.assert_close(gradient, grad(expected)(X))
    with pytest.raises(BackendUnavailableError, match=refusal):
        gradient.sum().backward()


# Derivatives of derivatives that are refused: gradients and tangents are constants.
OF_REFUSED = [(vjp, jvp), (vjp, jvp, vjp), (vjp, vjp, vjp)]


def check_compiled_derivatives_of_refused(chain: Chain, found: Function, refusal: str) -> None:
    """The refusal stays in the graph, whose result depends on it."""
    torch._dynamo.reset()
    compiled = torch.compile(composed(chain, found), fullgraph=True, backend="aot_eager")
    with pytest.raises(BackendUnavailableError, match=refusal):
        compiled(X)


def check_vjp_after_its_transform(
    within: type, found: Function, expected: Function, refusal: str
) -> None:
    """The function that torch.func.vjp returns, called in another gradient mode and mapped."""
    (wanted,) = torch.func.vjp(expected, X)[1](TANGENT)
    _, pull = torch.func.vjp(found, X)
    with within():
        (pulled,) = pull(TANGENT)
    torch.testing.assert_close(pulled, wanted)
    (mapped,) = torch.vmap(pull)(torch.stack([TANGENT, 2 * TANGENT]))
    torch.testing.assert_close(mapped, torch.stack([wanted, 2 * wanted]))
    with pytest.raises(BackendUnavailableError, match=refusal):
        torch.func.grad(lambda tangent: pull(tangent)[0].sum())(TANGENT)


def check_unused_second_derivatives(function: Function, refusal: str) -> None:
    """A gradient with a graph is right; only its own derivative is refused."""
    leaf = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
    (found,) = torch.autograd.grad((leaf.square() + first.detach()).sum(), leaf)
    torch.testing.assert_close(found, 2 * leaf.detach())
    with pytest.raises(BackendUnavailableError, match=refusal):
        first.sum().backward()
