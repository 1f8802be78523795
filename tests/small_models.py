"""Randomly initialized models of the package transformers, a few layers each, and what they eat."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from transformers.masking_utils import create_causal_mask

# The argument for a cache, of models and of functions that make masks. It was renamed in
# transformers 5.24.
_HAS_CACHE: Final = "cache" in inspect.signature(create_causal_mask).parameters
CACHE: Final = "cache" if _HAS_CACHE else "past_key_values"
BATCH = 2
VOCABULARY = 97
PADDINGS = ("none", "left", "right")


@dataclass(frozen=True)
class SmallModel:
    """A class of transformers and the options of its configuration, by sequence length."""

    architecture: str
    configuration: str
    options: Callable[[int], dict[str, Any]]
    head_dim: int


def _layers(**others: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **others,
    }


def _whisper(length: int) -> dict[str, Any]:
    layers = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers",)}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    ids = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return {
        "vocab_size": VOCABULARY,
        "d_model": 128,
        "num_mel_bins": 8,
        "max_source_positions": length + 10,
        "max_target_positions": 2 * length,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        **layers,
        **heads,
        **ids,
    }


MODELS = {
    "llama": SmallModel(
        "LlamaForCausalLM",
        "LlamaConfig",
        lambda _: _layers(hidden_size=128, num_key_value_heads=2),
        32,
    ),
    "qwen3": SmallModel(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        lambda _: _layers(hidden_size=128, num_key_value_heads=1, head_dim=64),
        64,
    ),
    "gemma2": SmallModel(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        lambda length: _layers(
            hidden_size=128,
            num_key_value_heads=2,
            head_dim=64,
            sliding_window=length // 3,
            attn_logit_softcapping=2.0,
        ),
        64,
    ),
    "mistral": SmallModel(
        "MistralForCausalLM",
        "MistralConfig",
        lambda length: _layers(hidden_size=128, num_key_value_heads=2, sliding_window=length // 3),
        32,
    ),
    "phi": SmallModel("PhiForCausalLM", "PhiConfig", lambda _: _layers(hidden_size=128), 32),
    "gpt_neox": SmallModel(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        lambda _: _layers(hidden_size=80, rotary_pct=0.5),
        20,
    ),
    "bert": SmallModel("BertModel", "BertConfig", lambda _: _layers(hidden_size=128), 32),
    "modernbert": SmallModel(
        "ModernBertModel",
        "ModernBertConfig",
        lambda length: _layers(
            hidden_size=128,
            local_attention=length // 3,
            global_attn_every_n_layers=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        32,
    ),
    # It does not tell its layers of the window: the mask alone does.
    "qwen2_moe": SmallModel(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        lambda length: _layers(
            hidden_size=128,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=length // 3,
            max_window_layers=0,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        32,
    ),
    "vit": SmallModel(
        "ViTModel",
        "ViTConfig",
        lambda _: _layers(hidden_size=128, image_size=32, patch_size=4),
        32,
    ),
    "whisper": SmallModel("WhisperForConditionalGeneration", "WhisperConfig", _whisper, 32),
    "t5": SmallModel(
        "T5ForConditionalGeneration",
        "T5Config",
        lambda _: {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 1,
        },
        32,
    ),
}
DECODERS = tuple(name for name, one in MODELS.items() if "ForCausalLM" in one.architecture)
# One rounding more or less may choose another expert.
WITH_EXPERTS = ("qwen2_moe",)


def cases() -> list[tuple[str, str]]:
    """Each model with each padding that it can have."""
    return [(name, padding) for name in MODELS for padding in PADDINGS[: 1 if name == "vit" else 3]]


def small_model(name: str, length: int) -> Any:
    """The model, eager, in float32 on the CPU, not training; always the same."""
    made = MODELS[name]
    configuration = getattr(transformers, made.configuration)(**made.options(length))
    torch.manual_seed(0)
    model = getattr(transformers, made.architecture)(configuration).eval()
    with torch.no_grad():
        # As they come, weights are so small that attention hardly depends on the scores.
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(3)
    model.set_attn_implementation("eager")
    return model


def padding_mask(padding: str, length: int) -> torch.Tensor:
    """[BATCH, length], 0 where there is padding: a third of the second sequence."""
    mask = torch.ones((BATCH, length), dtype=torch.long)
    if padding == "left":
        mask[1, : length // 3] = 0
    elif padding == "right":
        mask[1, -(length // 3) :] = 0
    return mask


def inputs(name: str, length: int, padding: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the model eats, and which rows of its output count, [BATCH, rows]."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (BATCH, length), generator=generator)
    mask = padding_mask(padding, length)
    if name == "vit":
        pixels = torch.randn((BATCH, 3, 32, 32), generator=generator)
        return {"pixel_values": pixels}, torch.ones((BATCH, 65))
    if name == "whisper":
        features = torch.randn((BATCH, 8, 2 * length + 20), generator=generator)
        decoder = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        return {"input_features": features, **decoder}, mask
    if name == "t5":
        # As many queries as keys, and none of the queries is padding.
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}, mask * 0 + 1
    return {"input_ids": ids, "attention_mask": mask}, mask


def output(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """Logits, or the last hidden states of a model without a head."""
    options = (
        {} if "pixel_values" in given or model.config.model_type == "bert" else {"use_cache": False}
    )
    answer = model(**given, **options)
    found: torch.Tensor = answer.logits if "logits" in answer else answer.last_hidden_state
    return found


def with_gradients(
    model: Any, given: dict[str, Any], counts: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output rows that count, and the gradients of parameters for a weighted sum of them."""
    model.zero_grad(set_to_none=True)
    kept = output(model, given)[counts.to(model.device) != 0]
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(kept.shape, generator=generator).to(kept)
    (kept * weights).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return kept.detach(), grads
