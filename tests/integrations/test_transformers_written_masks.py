"""Masks that are written in place after layers took their visibility, eagerly and in graphs."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as upstream
from small_models import CACHE
from transformers.masking_utils import create_causal_mask

from flashvar.integrations import transformers
from flashvar.integrations.transformers.attention import attention
from flashvar.integrations.transformers.lazy_masks import LazyMask, attached

LENGTH, HIDDEN = 12, 2
LOWEST = torch.finfo(torch.float32).min


def fill_view(mask: torch.Tensor) -> None:
    mask[..., :HIDDEN].fill_(LOWEST)


def assign(mask: torch.Tensor) -> None:
    mask[..., :HIDDEN] = LOWEST


def fill(mask: torch.Tensor) -> None:
    mask.masked_fill_(torch.arange(LENGTH) < HIDDEN, LOWEST)


def fill_detached(mask: torch.Tensor) -> None:
    mask.detach()[..., :HIDDEN].fill_(LOWEST)


def fill_data(mask: torch.Tensor) -> None:
    mask.data[..., :HIDDEN].fill_(LOWEST)


def add_out(mask: torch.Tensor) -> None:
    hidden = torch.zeros(LENGTH).masked_fill(torch.arange(LENGTH) < HIDDEN, -1e9)
    torch.add(mask, hidden, out=mask)


WRITES = [fill_view, assign, fill, fill_detached, add_out]
CONFIGS = {
    implementation: upstream.LlamaConfig(hidden_size=32, num_attention_heads=2)
    for implementation in ("eager", "flashvar")
}
Write = Callable[[torch.Tensor], None]


@pytest.fixture(autouse=True)
def registered() -> None:
    transformers.register()
    for implementation, config in CONFIGS.items():
        config._attn_implementation = implementation


def padding() -> torch.Tensor:
    seen = torch.ones((2, LENGTH), dtype=torch.long)
    seen[1, 9:] = 0
    return seen


def made(implementation: str, seen: torch.Tensor | None) -> torch.Tensor:
    mask: torch.Tensor = create_causal_mask(
        config=CONFIGS[implementation],
        inputs_embeds=torch.zeros(2, LENGTH, 32),
        attention_mask=seen,
        position_ids=None,
        **{CACHE: None},
    )
    return mask


def layer(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attention(torch.nn.Identity(), x, x, x, mask)[0]


def expected(x: torch.Tensor, padded: bool, write: Write) -> list[torch.Tensor]:
    """Attention before and after the write."""
    mask = made("eager", padding() if padded else None)
    outs = []
    for _ in range(2):
        weights = torch.softmax(x @ x.mT * x.shape[-1] ** -0.5 + mask, -1)
        outs.append((weights @ x).transpose(1, 2))
        write(mask)
    return outs


def assert_same(found: Any, wanted: Any, padded: bool) -> None:
    kept = (padding() if padded else torch.ones(2, LENGTH)) != 0
    kept[:, :HIDDEN] = False  # they see no key after the write
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[kept], other[kept], rtol=1e-4, atol=1e-5)


# A compilation takes most of a second: a quarter of all combinations, with any two of the four, and
# with any three without the write, whose kind the making of a mask does not depend on. Where the
# graph breaks, which makes three graphs, one of the two writes that fill a view.
GRAPHS = [
    (where, write, ["whole", "padded"][(h + i) % 2], ["recorded", "inference"][(h + i // 2) % 2])
    for (h, where), (i, write) in itertools.product(
        enumerate(["one graph", "broken graph"]), enumerate(WRITES)
    )
    if (where, write) != ("broken graph", fill_view)
]


@pytest.mark.parametrize(("where", "write", "mask", "mode"), GRAPHS)
def test_a_graph_writes_to_its_mask(where: str, write: Write, mask: str, mode: str) -> None:
    padded = mask == "padded"

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = made("flashvar", padding() if padded else None)
        before = layer(x, mask)
        if where == "broken graph":
            torch._dynamo.graph_break()
        write(mask)
        if where == "broken graph":
            torch._dynamo.graph_break()
        return before, layer(x, mask)

    torch._dynamo.reset()
    x = torch.randn(2, 2, LENGTH, 16)
    compiled = torch.compile(both, backend="aot_eager", fullgraph=where == "one graph")
    with torch.inference_mode(mode == "inference"):
        assert_same(compiled(x), expected(x, padded, write), padded)


@pytest.mark.parametrize("write", [*WRITES, fill_data])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_mask_is_written_between_layers(write: Write, compiled: bool) -> None:
    """Compiled one by one, layers get a mask of eager code as an input of their graphs.

    These are the same after every write.
    """
    x = torch.randn(2, 2, LENGTH, 16)
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    mask = made("flashvar", padding())
    assert isinstance(mask, LazyMask)
    before = run(x, mask)
    write(mask)
    assert_same((before, run(x, mask)), expected(x, True, write), True)


def test_a_graph_that_does_not_write_uses_the_visibility() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def twice(x: torch.Tensor) -> list[torch.Tensor]:
        mask = made("flashvar", None)
        return [layer(x, mask), layer(x, mask)]

    torch.compile(twice, backend=backend, fullgraph=True)(torch.randn(2, 2, LENGTH, 16))
    calls = [node for node in graphs[0].graph.nodes if "attention_fwd" in str(node.target)]
    assert len(calls) == 2
    assert all(node.args[3] is None for node in calls)


def test_aliases_share_writes_and_copies_do_not() -> None:
    mask = made("flashvar", padding())
    alias, copy = mask.detach(), mask.clone()
    fill(mask)
    assert attached(mask) is attached(alias) is None
    assert attached(copy) is not None
    assert torch.equal(alias + 0, mask + 0)
    assert torch.equal(copy + 0, made("eager", padding()))


def test_padding_that_is_written_before_the_mask_is_evaluated() -> None:
    given = padding()
    mask = made("flashvar", given)
    given.fill_(1)
    assert torch.equal(mask + 0, made("eager", padding()))


def test_positions_that_eager_code_has_read_are_positions_of_a_graph() -> None:
    x, positions = torch.randn(1, 2, LENGTH, 16), torch.arange(LENGTH)[None]

    def packed(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return attention(torch.nn.Identity(), x, x, x, None, position_ids=positions)[0]

    wanted = packed(x, positions)
    found = torch.compile(packed, backend="aot_eager", fullgraph=True)(x, positions)
    torch.testing.assert_close(found, wanted)


def test_an_exported_graph_needs_only_the_ops_of_attention(
    tmp_path: Path, python_with_models: str
) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layer(x, made("flashvar", None))

    x = torch.randn(2, 2, LENGTH, 16)
    torch.export.save(torch.export.export(Layer(), (x,), strict=True), tmp_path / "layer.pt2")
    load = f"torch.export.load({str(tmp_path / 'layer.pt2')!r})"
    code = f"import sys, torch, flashvar; flashvar.attention; {load}"
    code += "; assert 'flashvar.integrations.transformers' not in sys.modules"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src" / "python")}
    ended = subprocess.run([python_with_models, "-c", code], env=environ, stderr=subprocess.PIPE)
    assert ended.returncode == 0, ended.stderr.decode()
