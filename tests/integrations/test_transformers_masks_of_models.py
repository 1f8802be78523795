"""Models whose layers read their masks, compute attention themselves or select keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as upstream
from small_models import PADDINGS, padding_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function

from flashvar.errors import BackendUnavailableError
from flashvar.integrations import fallback
from flashvar.integrations import transformers as transformers
from flashvar.integrations.transformers.attention import attention
from flashvar.integrations.transformers.lazy_masks import attach
from flashvar.integrations.transformers.mask import attention_mask
from flashvar.integrations.transformers.visibility import Visibility

LENGTH = 12
_SIZES = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
_ENCODER = {**_SIZES, "intermediate_size": 32}
_DECODER = {"vocab_size": 97, "d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 32}
# The models, and whether flashvar computes some of their attention.
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "BloomForCausalLM": ({"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4}, False),
    "CodeGenForCausalLM": (
        {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
        True,
    ),
    "MPNetForMaskedLM": (_ENCODER, False),
    "DogeForCausalLM": ({**_ENCODER, "num_key_value_heads": 2}, True),
    "BigBirdPegasusForCausalLM": ({**_DECODER, "decoder_attention_heads": 4}, True),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.register()
    monkeypatch.setattr(fallback, "_logged", set())


def made(name: str, implementation: str) -> Any:
    kind = getattr(upstream, name)
    torch.manual_seed(0)
    model = kind._from_config(
        kind.config_class(**MODELS[name][0]), attn_implementation=implementation
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(3)
    return model


@pytest.mark.parametrize("padding", [None, *PADDINGS])
@pytest.mark.parametrize("name", MODELS)
def test_they_get_masks_that_can_be_read(
    name: str, padding: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = padding_mask(padding or "none", LENGTH)
    given = {} if padding is None else {"attention_mask": mask}
    expected, found = (made(name, by)(ids, **given).logits for by in ("eager", "flashvar"))
    kept = mask != 0
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-4)
    said = [record.message for record in caplog.records if record.name.startswith("flashvar")]
    assert ["compute attention themselves" in message for message in said] == (
        [] if MODELS[name][1] else [True]
    )


def test_strict_mode_says_that_flashvar_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    model = made("BloomForCausalLM", "flashvar")
    with pytest.raises(
        BackendUnavailableError, match=r"BloomForCausalLM: .*compute attention themselves"
    ):
        model(torch.ones((1, 4), dtype=torch.long))


def test_a_pooling_module_of_torchs_gets_a_mask_that_it_knows() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "patch_size": 4, "num_patches": 16}
    config = upstream.Siglip2VisionConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
    model = upstream.Siglip2VisionModel(config).eval()
    given = {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": padding_mask("right", 16),
        "spatial_shapes": torch.tensor([[4, 4], [4, 2]]),
    }
    found = []
    for implementation in ("eager", "flashvar"):
        model.set_attn_implementation(implementation)
        found.append(model(**given).pooler_output)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def joining(implementation: str, layers: int) -> Any:
    """A model whose decoder joins its mask to that of cross attention with torch.cat."""
    text = {**_ENCODER, "hidden_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    text["dropout_rate"] = 0.0
    images = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14, "hidden_size": 16}
    images |= {"intermediate_size": 16, "num_attention_heads": 2}
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = upstream.T5Gemma2Config(
        encoder={
            "text_config": {**text, **one_layer},
            "vision_config": images,
            "mm_tokens_per_image": 4,
        },
        decoder=text,
        vocab_size=97,
    )
    torch.manual_seed(0)
    return upstream.T5Gemma2Model._from_config(config, attn_implementation=implementation).eval()


KINDS = ["none", "padding", "one mask", "a mask for each kind"]
# Compiled, which takes a second, only with each mask of both, and each lazy and written one beside
# the other; eager with any two.
JOINED = [("eager", own, cross) for own in KINDS if own != "padding" for cross in KINDS]
JOINED += [("compiled", "none", "none"), ("compiled", "none", "a mask for each kind")]
JOINED += [("compiled", "one mask", "padding"), ("compiled", "a mask for each kind", "one mask")]


# Where a graph breaks, Dynamo of torch 2.13 instantiates torch's class.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("how", "own", "cross"), JOINED)
def test_a_bool_mask_is_joined_to_other_masks(how: str, own: str, cross: str) -> None:
    ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(1))
    seen = torch.ones((6, 6), dtype=torch.bool).tril().expand(2, 1, 6, 6).clone()
    seen[1, :, 3:, :2] = False
    of_encoder = torch.ones((2, 1, 6, 6), dtype=torch.bool)
    of_encoder[1, :, :, 5:] = False
    masks = [
        {
            "none": None,
            "padding": padding_mask("right", 6),
            "one mask": mask,
            "a mask for each kind": {"full_attention": mask, "sliding_attention": mask},
        }
        for mask in (seen, of_encoder)
    ]
    given: dict[str, Any] = {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
    given |= {"decoder_attention_mask": masks[0][own], "attention_mask": masks[1][cross]}
    found = []
    for implementation in ("sdpa", "flashvar"):
        # A graph has what one layer does; in eager code a second one reads the same masks.
        model = joining(implementation, layers=1 if how == "compiled" else 2)
        if how == "compiled" and implementation == "flashvar":
            torch._dynamo.reset()
            # The decoder joins; the encoder has one mask while compiled, and each in eager code.
            part = model if cross == "padding" else model.decoder
            part.compile(backend="eager")
        with torch.no_grad():
            found.append(model(**given).last_hidden_state)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("word", ["indices", "block_indices"])
def test_keys_selected_by_indices_are_refused(word: str) -> None:
    """Their models mask the other keys for eager and sdpa only: no path of ours would."""
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(BackendUnavailableError, match=r"by indices.*attn_implementation='sdpa'"):
        attention(torch.nn.Identity(), q, q, q, None, **{word: torch.zeros((1, 5, 2))})
    out, _ = attention(torch.nn.Identity(), q, q, q, None, **{word: None})
    assert out.shape == (1, 5, 2, 16)


def test_keys_that_stay_in_a_paged_cache_are_refused() -> None:
    """The tensors have the new keys only: attention of these alone would be wrong."""
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(BackendUnavailableError, match=r"paged cache.*max_blocks_per_request=0"):
        attention(torch.nn.Identity(), q, q, q, None, block_table=torch.zeros((1, 4)))


def test_sinks_of_each_query_are_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(BackendUnavailableError, match=r"no eager attention.* sinks"):
        attention(torch.nn.Identity(), q, q, q, None, sinks=torch.zeros((1, 2, 5, 1)))
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    with pytest.raises(BackendUnavailableError, match="sinks that change with the query"):
        attention(torch.nn.Identity(), q, q, q, None, sinks=torch.zeros((1, 2, 5, 1)))


def test_keys_beyond_a_mask_with_a_visibility_are_not_read() -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 3, 4, 8), torch.randn(2, 2, 3, 6, 8)
    values = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 4, 4)
    visibility = Visibility(True, (-1, -1), 4, plain=True)
    found, expected = (
        attention(torch.nn.Identity(), q, k, v, mask, scaling=0.3, is_causal=True)[0]
        for mask in (attach(values.clone(), visibility), values)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("queries", [1, 2])
def test_a_mask_that_hides_nothing_is_none_for_all_keys(queries: int) -> None:
    """Encoders that keep keys in a cache create masks for the new ones alone."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 3, queries, 8), torch.randn(2, 2, 3, 6, 8)
    mask = attention_mask(2, queries, queries, mask_function=bidirectional_mask_function)
    layer = torch.nn.Identity()
    found, _ = attention(layer, q, k, v, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(layer, q, k, v, None, scaling=0.3, is_causal=False)
    torch.testing.assert_close(found, expected)


def test_a_mask_of_one_column_is_that_of_every_key() -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 3, 4, 8), torch.randn(2, 2, 3, 6, 8)
    mask = torch.randn(2, 1, 4, 1)
    layer = torch.nn.Identity()
    found, _ = attention(layer, q, k, v, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(layer, q, k, v, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)
