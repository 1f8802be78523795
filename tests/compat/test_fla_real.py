"""`flashvar.compat.fla` and `flashvar.layers` beside flash-linear-attention itself, on the CPU.

What needs no kernel of flash-linear-attention; tests/gpu/upstream_fla.py runs its own tests.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashvar.layers
from flashvar.compat import fla as ours
from flashvar.compat.fla import convolution, delta_rule
from flashvar.ops.gated_delta_rule.api import gated_delta_rule

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that there is no GPU
    fla = pytest.importorskip("fla", reason="flash-linear-attention is not installed: nox -s fla")
    layers = importlib.import_module("fla.layers")
    modules = importlib.import_module("fla.modules.convolution")
    ops = importlib.import_module("fla.ops")

SINCE_0_6 = importlib.util.find_spec("fla.backends") is not None
NAMES = (*delta_rule.__all__, *convolution.__all__)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    ours.uninstall()


def bound() -> dict[tuple[str, str], Any]:
    """The functions of these names in all of its modules."""
    return {
        (module.__name__, name): getattr(module, name)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").split(".")[0] == "fla"
        for name in NAMES
        if callable(vars(module).get(name))
    }


def test_all_of_its_modules_call_ours() -> None:
    theirs = bound()
    ours.install(strict=True)
    found = bound()
    kept = {key for key in theirs if found[key] is theirs[key]}
    assert len(theirs) > 20
    # 0.5.1 has this one twice, and calls the other.
    assert kept <= {("fla.modules.conv.triton.kernels", "causal_conv1d_update")}
    ours.uninstall()
    assert bound() == theirs


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name: str) -> None:
    home = modules if name in convolution.__all__ else ops
    theirs = inspect.signature(getattr(home, name)).parameters.values()
    ours.install()
    found = list(inspect.signature(getattr(home, name)).parameters.values())
    ordered = [x for x in theirs if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert [(x.name, x.default) for x in found[: len(ordered)]] == [
        (x.name, x.default) for x in ordered
    ]


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"num_v_heads": 4, "conv_bias": True, "allow_neg_eigval": True},
    "no gate": {"use_gate": False, "conv_size": 3},
    "no convolution": {"use_short_conv": False},
}


@pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_state_dicts_load_both_ways(options: dict[str, Any]) -> None:
    made = []
    for layer in (layers.GatedDeltaNet, flashvar.layers.GatedDeltaNet):
        torch.manual_seed(5)
        made.append(layer(hidden_size=48, head_dim=8, num_heads=2, expand_v=1.5, **options))
    theirs, found = (one.state_dict() for one in made)
    assert list(theirs) == list(found)
    for name in theirs:
        assert theirs[name].dtype == found[name].dtype
        assert torch.equal(theirs[name], found[name])  # the same initial values
    for one, state in zip(made, (found, theirs), strict=True):
        one.load_state_dict(state)
    decayed = [[hasattr(p, "_no_weight_decay") for p in one.parameters()] for one in made]
    assert decayed[0] == decayed[1]
    of_theirs = inspect.signature(layers.GatedDeltaNet).parameters
    of_ours = list(inspect.signature(flashvar.layers.GatedDeltaNet).parameters.values())
    shared = [x for x in of_ours if x.name in of_theirs]
    assert [(x.name, x.default) for x in shared] == [
        (x.name, x.default) for x in of_theirs.values()
    ]


def test_its_short_convolution() -> None:
    theirs, found = modules.ShortConvolution(6, 4), flashvar.layers.ShortConvolution(6, 4)
    found.load_state_dict(theirs.state_dict())
    ours.install(strict=True)
    x, cache = torch.randn(2, 5, 6), torch.randn(2, 6, 4)
    for one, state in ((x, cache), (x, None), (x[:, :1], cache)):
        with torch.no_grad():
            wanted, after = theirs(one, cache=_copy(state), output_final_state=True)
            y, final = found(one, cache=_copy(state), output_final_state=True)
        assert torch.equal(y, wanted)
        assert torch.equal(final, after)


def _copy(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.clone()


def test_its_registry() -> None:
    ours.register()
    ours.register()
    x, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    state = torch.randn(2, 6, 4, requires_grad=True)
    leaves = (x, weight, state)
    results = [
        call(
            x, weight, initial_state=state, residual=x, output_final_state=final, activation="silu"
        )
        for final in (False, True)
        for call in (modules.causal_conv1d, convolution.causal_conv1d)
    ]
    for (found, after), (wanted, final) in (results[:2], results[2:]):
        assert torch.equal(found, wanted)
        assert (after is None) is (final is None)
        if after is not None:
            assert torch.equal(after, final)
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves)
        )
    token = torch.randn(2, 6)
    caches = state.detach().clone(), state.detach().clone()
    found = [
        call(x=token, cache=cache, weight=weight.detach())
        for call, cache in zip(
            (modules.causal_conv1d_update, convolution.causal_conv1d_update), caches, strict=True
        )
    ]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(*caches)


def test_its_registry_takes_residuals_of_flat_heads() -> None:
    ours.register()
    x, residual = torch.randn(2, 5, 3, 2), torch.randn(2, 5, 6, requires_grad=True)
    y, _ = modules.causal_conv1d(x, torch.randn(6, 4), residual=residual)
    upstream = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, residual, upstream)
    assert torch.equal(grad, upstream.flatten(2))


@pytest.mark.skipif(not SINCE_0_6, reason="only the convolution is dispatched before 0.6")
def test_its_registry_has_the_gated_delta_rule() -> None:
    ours.register()
    q, k = torch.randn(2, 1, 5, 2, 8).unbind()
    v, g, beta = torch.randn(1, 5, 2, 6), -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    found, _ = ops.chunk_gated_delta_rule(q, k, v, g, beta)
    assert torch.equal(found, gated_delta_rule(q, k, v, g, beta)[0])
    backends = importlib.import_module("fla.backends")
    mine = backends._operation_registries["gated_delta_rule"]._backends["flashvar"]
    verified = mine.verify("chunk_gated_delta_rule", q, k, v, g, beta, cp_context=object())
    assert verified == (False, "cp_context is given")


def test_does_not_stand_in_for_it() -> None:
    with pytest.raises(flashvar.ConfigurationError, match=r"call install\(\)"):
        ours.provide()
    assert sys.modules["fla"] is fla
