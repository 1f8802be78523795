"""Generation on flashvar: eager's tokens, from growing and from static caches."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from small_models import CACHE, DECODERS, inputs, padding_mask, small_model

from flashvar.integrations import transformers as transformers

LENGTH, NEW = 9, 8


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.register()
    monkeypatch.setenv("FLASHVAR_STRICT", "1")


def generate(model: Any, given: dict[str, Any], **options: Any) -> Any:
    return model.generate(
        **given,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        disable_compile=True,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def assert_same(model: Any, given: dict[str, Any], **options: Any) -> None:
    expected = generate(model, given, **options)
    model.set_attn_implementation("flashvar")
    found = generate(model, given, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_tokens(name: str, padding: str, cache: str) -> None:
    # The window is a third of the length: a cache that slides is full after the prompt.
    given, _ = inputs(name, LENGTH, padding)
    assert_same(small_model(name, LENGTH), given, cache_implementation=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_encoder_and_decoder(cache: str) -> None:
    given, _ = inputs("t5", LENGTH, "right")
    del given["decoder_input_ids"]
    assert_same(small_model("t5", LENGTH), given, cache_implementation=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_chunks(name: str, cache: str) -> None:
    given, _ = inputs(name, LENGTH, "left")
    options = {"prefill_chunk_size": 4, "cache_implementation": cache}
    assert_same(small_model(name, LENGTH), given, **options)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_beams(padding: str) -> None:
    given, _ = inputs("llama", LENGTH, padding)
    assert_same(small_model("llama", LENGTH), given, num_beams=3)


def test_continuous_batching() -> None:
    """Requests of several lengths, out of one paged cache, with a window."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
        pytest.skip("this transformers tells its paged cache's lengths to its own functions alone")
    model = small_model("mistral", LENGTH)
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(2, 97, (n,), generator=generator).tolist() for n in (5, 17, 1)]
    options = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=96, pad_token_id=0)
    expected = [
        model.generate(torch.tensor([prompt]), generation_config=options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    model.set_attn_implementation("flashvar")
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)  # not all of the memory
    answers = model.generate_batch(
        prompts, generation_config=options, continuous_batching_config=small, progress_bar=False
    )
    assert [answer.generated_tokens for answer in answers.values()] == expected


def with_one_layer(model: Any) -> Any:
    """The model without its other layers, which would add the same to a graph again."""
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    return model


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_masks_that_generate_makes_enter_graphs(name: str) -> None:
    """A mask, or a dict of one for each kind of layer, made before the compiled forward."""
    given, _ = inputs(name, LENGTH, "left")
    model = small_model(name, LENGTH)
    if name == "llama":
        model = with_one_layer(model)
    expected = generate(model, given)
    model.set_attn_implementation("flashvar")
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    found = generate(model, given, cache_implementation="static")
    assert found.sequences.tolist() == expected.sequences.tolist()


def test_a_static_cache_compiles() -> None:
    """A graph for every step, without reading a length from the device."""
    from transformers import StaticCache

    model = with_one_layer(small_model("llama", LENGTH))
    given, _ = inputs("llama", LENGTH, "left")
    expected = generate(model, given).sequences
    model.set_attn_implementation("flashvar")
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + NEW)
    mask = padding_mask("left", LENGTH)
    step = torch.compile(model, backend="eager", fullgraph=True)
    tokens = expected[:, :LENGTH]
    with torch.no_grad():
        logits = model(**given, **{CACHE: cache}).logits
        for _ in range(3):
            tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            places = mask.sum(-1, keepdim=True) - 1
            logits = step(
                tokens[:, -1:], attention_mask=mask, position_ids=places, **{CACHE: cache}
            ).logits
    assert tokens.tolist() == expected[:, : LENGTH + 3].tolist()
