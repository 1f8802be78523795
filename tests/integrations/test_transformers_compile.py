"""Models of transformers compiled into one graph, in which flashvar computes every attention."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.backends.debugging import aot_eager

from flashvar.integrations import transformers as ours

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_IMAGES = {**_SIZES, "image_size": 32, "patch_size": 8}
_WORDS = {**_SIZES, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 97, (2, 12))}


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones((2, 12), dtype=torch.long)
    mask[1, 7:] = 0
    return {**ids(), "attention_mask": mask}


def packed() -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    return {"input_ids": ids()["input_ids"][:1], "position_ids": positions}


def sound() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 400)}


_WAV2VEC2 = {
    **_SIZES,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
}
_LLAMA = {**_WORDS, "num_key_value_heads": 1, "use_cache": False}
# A class, which takes a moment to load, its configuration, and what it eats: one of each way to
# attention, as a graph takes seconds. What of it all models share is judged by the sweep.
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "vit": ("transformers:ViTModel", "ViTConfig", _IMAGES, pixels),
    "wav2vec2": ("transformers:Wav2Vec2Model", "Wav2Vec2Config", _WAV2VEC2, sound),
    "bert": ("transformers:BertModel", "BertConfig", _WORDS, ids),
    "bert padded": ("transformers:BertModel", "BertConfig", _WORDS, padded),
    "llama": ("transformers:LlamaModel", "LlamaConfig", _LLAMA, ids),
    "llama padded": ("transformers:LlamaModel", "LlamaConfig", _LLAMA, padded),
    "llama packed": ("transformers:LlamaModel", "LlamaConfig", _LLAMA, packed),
    "llama packed, cached": (
        "transformers:LlamaModel",
        "LlamaConfig",
        {**_LLAMA, "use_cache": True, "num_hidden_layers": 2},  # a cache tells layers apart
        packed,
    ),
}
# Models whose gradients are compared too.
TRAINED = ("vit", "llama")


def small(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model on flashvar, and what it eats."""
    ours.register()
    architecture, configuration, options, make = MODELS[name]
    torch.manual_seed(0)
    made = pkgutil.resolve_name(architecture)(getattr(transformers, configuration)(**options))
    model = made.eval()
    model.set_attn_implementation("flashvar")
    return model, make()


# Wav2Vec2 asks transformers whether it is distributed, in code that Dynamo traces through a cache.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    model, given = small(name)
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        # With gradients, the graph of the backward is traced as well.
        return aot_eager(graph, examples) if name in TRAINED else graph

    torch._dynamo.reset()
    weights = list(model.parameters())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = compiled(**given).last_hidden_state
    assert targets.count("flashvar.attention_fwd.default") == model.config.num_hidden_layers
    model.set_attn_implementation("eager")
    model.config.use_cache = False  # with a cache, eager looks at positions nowhere
    kept = given.get("attention_mask", torch.ones(found.shape[:2])) != 0
    expected = model(**given).last_hidden_state
    torch.testing.assert_close(found[kept], expected[kept])
    if name in TRAINED:
        # Not of its squares: behind a norm their sum is constant.
        given_back = torch.randn_like(expected)
        of_found, of_expected = (
            torch.autograd.grad(out, weights, given_back, materialize_grads=True)
            for out in (found, expected)
        )
        torch.testing.assert_close(of_found, of_expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_layers_that_are_compiled_one_by_one_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a second model, whose layers run the graphs of the first."""
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    torch._dynamo.reset()
    for _ in range(2):
        model, given = small("llama padded")
        expected = model(**given).last_hidden_state
        model, given = small("llama padded")
        for layer in model.layers:
            layer.compile(backend="eager")
        torch.testing.assert_close(model(**given).last_hidden_state, expected)
