"""Projections of a GatedDeltaNet that are computed as one, and those that are not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashvar.layers import GatedDeltaNet, ShortConvolution

HIDDEN = 24
ENOUGH = 2 * HIDDEN  # rows from which projections are joined
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def made() -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(HIDDEN, expand_v=1.5, head_dim=8, num_heads=2, num_v_heads=4).double()


def products(layer: GatedDeltaNet, x: torch.Tensor) -> int:
    with Products() as counted:
        layer(x)
    return counted.count


def with_a_hook(layer: GatedDeltaNet, name: str) -> None:
    getattr(layer, name).register_forward_hook(lambda _module, _inputs, output: 2 * output)


def with_a_forward_of_its_own(layer: GatedDeltaNet, name: str) -> None:
    """As libraries do that load weights at each call."""
    projection = getattr(layer, name)
    project = projection.forward
    projection.forward = lambda x: 2 * project(x)


def with_a_bias(layer: GatedDeltaNet, name: str) -> None:
    projection = getattr(layer, name)
    projection.bias = nn.Parameter(torch.ones_like(projection.weight[:, 0]))


class Adapted(nn.Linear):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def of_another_class(layer: GatedDeltaNet, name: str) -> None:
    weight = getattr(layer, name).weight
    adapted = Adapted(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    adapted.weight = weight
    setattr(layer, name, adapted)


def called_by_hand(layer: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
    """The output with every projection called: a global hook, which does nothing, asks for that."""
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        out: torch.Tensor = layer(x)[0]
    finally:
        hook.remove()
    return out


@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_are_those_of_the_projections(compiled: bool) -> None:
    torch._dynamo.reset()
    layer = made()
    x = torch.randn(2, ENOUGH // 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    expected = called_by_hand(layer, x)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, grad)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    found = call(x)[0]
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, leaves, grad), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_two_products_take_the_place_of_five() -> None:
    x = torch.randn(1, ENOUGH, HIDDEN, dtype=torch.float64)
    assert products(made(), x) == 4
    assert products(made(), x[:, 1:]) == 7  # few rows: joined weights would be kept for little


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize(
    "change", [with_a_hook, with_a_forward_of_its_own, with_a_bias, of_another_class]
)
def test_changed_projections_are_called(
    change: Callable[[GatedDeltaNet, str], None], name: str
) -> None:
    layer, x = made(), torch.randn(1, ENOUGH, HIDDEN, dtype=torch.float64)
    unchanged = layer(x)[0]
    change(layer, name)
    found = layer(x)[0]
    torch.testing.assert_close(found, called_by_hand(layer, x))
    assert not torch.allclose(found, unchanged)


@pytest.mark.parametrize("kind", [nn.Linear, ShortConvolution])
def test_a_forward_that_others_gave_a_class_is_called(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries do that replace the products of all layers."""
    layer, x = made(), torch.randn(1, ENOUGH, HIDDEN, dtype=torch.float64)
    own = kind.forward
    calls: list[nn.Module] = []

    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        calls.append(self)
        return own(self, *arguments, **options)

    monkeypatch.setattr(kind, "forward", forward)
    expected = layer(x)[0]
    assert {id(one) for one in layer.modules() if type(one) is kind} == set(map(id, calls))
    monkeypatch.undo()
    torch.testing.assert_close(layer(x)[0], expected)


def test_a_forward_from_before_the_import_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made(), torch.randn(1, ENOUGH, HIDDEN, dtype=torch.float64)
    project = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", wraps(project)(lambda *given: 2 * project(*given)))
    spec = importlib.util.find_spec("flashvar.layers.joined")
    assert spec is not None
    assert spec.loader is not None
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    found = imported.project(x, (layer.q_proj, layer.k_proj))
    weights = torch.cat([layer.q_proj.weight, layer.k_proj.weight])
    torch.testing.assert_close(found, 2 * x @ weights.T)


def test_projections_of_different_dtypes_are_called() -> None:
    layer, x = made().float(), torch.randn(1, ENOUGH, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)[0]
        layer.k_proj.to(torch.bfloat16)
        torch.testing.assert_close(layer(x)[0], expected)


def test_frozen_projections_get_no_gradients() -> None:
    layer, x = made(), torch.randn(1, ENOUGH, HIDDEN, dtype=torch.float64)
    layer.k_proj.requires_grad_(False)
    layer(x)[0].sum().backward()
    assert layer.k_proj.weight.grad is None
    assert layer.q_proj.weight.grad is not None
    assert layer.v_proj.weight.grad is not None
