"""`flashvar.integrations.torch` in code that torch compiles or scripts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sdpa_calls import qkv
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashvar.integrations import torch as ours

OWN = functional.scaled_dot_product_attention


class Doubled(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * functional.scaled_dot_product_attention(q, k, v)


def graph_of(module: torch.nn.Module, *inputs: torch.Tensor, dynamic: bool) -> tuple[Any, str]:
    """What a compiled module returns, and the attention that its one graph calls."""
    targets = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        calls = (node for node in graph.graph.nodes if node.op == "call_function")
        targets.extend(str(node.target) for node in calls)
        return graph

    torch._dynamo.reset()
    out = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (found,) = (target for target in targets if "attention" in target)
    return out, found


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_compiles_into_one_graph(dynamic: bool) -> None:
    tensors, module = qkv(), Doubled()
    expected, found = graph_of(module, *tensors, dynamic=dynamic)
    assert "built-in" in found
    with ours.activate(backend="reference"):
        out, found = graph_of(module, *tensors, dynamic=dynamic)
        assert found == "flashvar.attention_fwd.default"
        with sdpa_kernel(SDPBackend.MATH):
            assert "built-in" in graph_of(module, *tensors, dynamic=dynamic)[1]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("shape", [(7, 7), (2, 1, 7, 7)], ids=["shared", "per-entry"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["bool", "added"])
def test_masks_compile_into_one_graph(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 7, 16, requires_grad=True) for _ in range(3))
    seen = (torch.rand(shape) > 0.5) | torch.eye(7, dtype=torch.bool)
    mask = seen if dtype is torch.bool else torch.randn(shape, dtype=dtype)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        *given, mask = tensors
        return functional.scaled_dot_product_attention(*given, attn_mask=mask)

    targets = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    expected = attend(q, k, v, mask)
    with ours.activate(backend="reference"):
        out = torch.compile(attend, backend=backend, fullgraph=True)(q, k, v, mask)
    assert [name for name in targets if "attention" in name] == ["flashvar.attention_fwd.default"]
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(found, wanted)


def test_compiled_transforms_go_to_torch() -> None:
    q = qkv()[0].detach()
    targets = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def loss(q: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, q, q).square().sum()

    gradient = torch.func.grad(loss)
    expected = gradient(q)
    torch._dynamo.reset()
    with ours.activate(backend="reference"):
        found = torch.compile(gradient, backend=backend, fullgraph=True)(q)
        torch.compile(loss, backend=backend, fullgraph=True)(q)
    torch.testing.assert_close(found, expected)
    in_turn = [target for target in targets if "attention" in target]
    assert ["flashvar" in target for target in in_turn] == [False, True]


def test_compiled_code_notices_an_activation() -> None:
    targets = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        return graph

    torch._dynamo.reset()
    module, tensors = torch.compile(Doubled(), backend=backend), qkv()
    module(*tensors)
    assert not any("flashvar" in target for target in targets)
    with ours.activate(backend="reference"):
        module(*tensors)
    assert any("flashvar" in target for target in targets)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_script_keeps_torchs_own() -> None:
    tensors = qkv()
    with ours.activate(backend="reference"):
        scripted = torch.jit.script(Doubled())
        torch.testing.assert_close(scripted(*tensors), 2 * OWN(*tensors))
        assert ours.report() == {}
