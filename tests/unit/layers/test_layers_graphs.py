"""Layers in compiled and exported graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashvar.layers import GatedDeltaNet


def made(**options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(hidden_size=24, head_dim=8, num_heads=2, expand_v=1.5, **options)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    layer = made()
    x = torch.randn(2, 6, 24)

    def call(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer(x)[0]
        return found * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(x), call(x)
    torch.testing.assert_close(found, wanted)
    parameters = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(wanted.sum(), parameters)
    )


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
@pytest.mark.parametrize("convolved", [True, False])
def test_padded_batches(convolved: bool) -> None:
    """How many tokens a mask keeps is not known while a graph is made."""
    layer = made(use_short_conv=convolved)
    torch._dynamo.reset()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen")}
    given = torch.randn(2, 6, 24), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    exported = torch.export.export(layer, given, dynamic_shapes=(dims, dims)).module()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x, mask = torch.randn(3, 9, 24), torch.ones(3, 9)
        mask[0, :8], mask[2, :3] = 0, 0
        results = [graph(x, mask.long())[0] for graph in (layer, exported, compiled)]
    weight = layer.q_proj.weight
    wanted, *found = [(y, *torch.autograd.grad(y.square().sum(), weight)) for y in results]
    for one in found:
        torch.testing.assert_close(one, wanted)
