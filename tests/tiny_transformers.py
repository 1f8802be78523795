"""Any model class of the package transformers, made tiny, and something that it eats."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers.models
from transformers import PreTrainedConfig, PreTrainedModel

BATCH, LENGTH = 2, 12
IMAGE, PATCH = 64, 16
VOCABULARY = 128
MOST_PARAMETERS = 70_000_000

# What a number of a configuration becomes, by its name; smaller ones stay.
_LAYERS = re.compile(r"(^|_)(n_layers?|layers|depth|num_layers|num_blocks|num_hidden_layers)$")
_SIZES: list[tuple[re.Pattern[str], int]] = [
    (re.compile(r"vocab_size$"), VOCABULARY),
    (re.compile(r"max_position_embeddings$|^n_positions$|^max_(source|target)_positions$"), 128),
    (re.compile(r"(experts|n_routed_experts)$"), 4),
    (re.compile(r"experts_per_tok(en)?$|^topk_group$|^n_group$|moe_(topk|k|top_k)$|^moe_k$"), 2),
    (re.compile(r"sliding_window$|^local_attention$|^index_topk$|chunk_size$"), 4),
    (re.compile(r"^image_size$"), IMAGE),
    (re.compile(r"^attn_layer_period$"), 2),
    (re.compile(r"^attn_layer_offset$"), 1),
]
_WIDTHS: list[tuple[re.Pattern[str], int]] = [
    (re.compile(r"^mamba_(d_head|head_dim)$"), 32),
    (re.compile(r"(key_value_heads|kv_heads)$"), 2),
    (re.compile(r"(^|_)heads?$"), 4),
    (re.compile(r"qk_head_dim$"), 32),
    (re.compile(r"head_dim$|^d_kv$|_kv_channels$|^head_size$"), 16),
    (re.compile(r"^rotary_dim$"), 8),
    (re.compile(r"lora_rank$"), 16),
    (re.compile(r"(intermediate_size|ffn_dim|^d_ff|mlp_dim|^n_inner|ffn_hidden_size)$"), 64),
    (
        re.compile(
            r"(hidden_size|d_model|^n_embd|^emb_dim|hidden_dim|embed_dim|embedding_size|projection_dim"
            r"|^dim|embedding_dim|^width|output_dim|^n_embed)$"
        ),
        64,
    ),
    (re.compile(r"^patch_size$"), PATCH),
]
_TOKEN = re.compile(r"_token_(id|index)$|_token_ids$|^(boi|eoi|boa|eoa)_token")
# What some default configurations leave out, and the model needs.
_MISSING: dict[str, Any] = {
    "attn_layer_indices": [1],
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "prediction_length": 8,
    "vocab_size": VOCABULARY,
    "vocabulary_map": {"<image>": 101},
}
# Parts of a rotation, which sum to half a head dim.
_SECTIONS = ("mrope_section", "xdrope_section")


def classes(pattern: str = "") -> Iterator[type[PreTrainedModel]]:
    """Every model class of the package whose name or folder fits, folder by folder."""
    root = Path(next(iter(transformers.models.__path__)))
    for file in sorted(root.glob("*/modeling_*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        except ImportError:  # a package that is not there, as with the model itself
            continue
        for name, one in vars(module).items():
            mine = isinstance(one, type) and one.__module__ == module.__name__
            # What is not exported is part of another.
            if not mine or not issubclass(one, PreTrainedModel):
                continue
            if getattr(transformers, name, None) is not one or "pretrained" in name.lower():
                continue
            if re.search(pattern, name) or re.fullmatch(pattern, file.parent.name):
                yield one


def _smaller(name: str, value: Any, layers: dict[int, int], width: int) -> Any:
    """The value of a configuration, smaller."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if _LAYERS.search(name):
            return min(value, 2)
        for pattern, size in (*_SIZES, *(_WIDTHS if width else ())):
            if pattern.search(name):
                return min(value, size * width // 64 if size in (16, 32, 64) else size)
        if _TOKEN.search(name):
            return value if value < VOCABULARY else 100 + sum(map(ord, name)) % 27
        return value
    if isinstance(value, list) and len(value) in layers and value:
        return _kinds(value, layers[len(value)])
    if isinstance(value, dict) and width == 64:
        return {key: _rotation(key, one) for key, one in value.items()}
    return value


def _kinds(values: list[Any], count: int) -> list[Any]:
    """So many of the values, each kind of them first."""
    if not all(isinstance(value, str | int | bool) for value in values):
        return values[:count]
    kinds = list(dict.fromkeys(values))[:count]
    return kinds + [kinds[-1]] * (count - len(kinds))


def _rotation(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rotation(key, one) for key, one in value.items()}
    if name in _SECTIONS and isinstance(value, list):
        return {3: [2, 3, 3], 4: [2, 2, 2, 2], 2: [4, 4]}.get(len(value), value)
    return value


def configuration(kind: type[PreTrainedConfig], width: int, complete: bool) -> PreTrainedConfig:
    """A configuration of few layers, of a width (0: its own); `complete` fills in what is None."""
    default = kind()
    given = default.to_dict()
    layers = {
        value: min(value, 2)
        for name, value in given.items()
        if isinstance(value, int) and value > 2 and _LAYERS.search(name)
    }
    parts = {name: getattr(default, name, None) for name in kind.sub_configs}
    wanted = {}
    for name, value in given.items():
        if isinstance(parts.get(name), transformers.TimmBackboneConfig):  # needs a package
            levels = 3 if "num_feature_levels" in given or "feat_strides" in given else 1
            stages = ["stage2", "stage3", "stage4"][-levels:]
            sizes = {"embedding_size": 16, "hidden_sizes": [16] * 4, "depths": [1] * 4}
            wanted[name] = transformers.ResNetConfig(**sizes, out_features=stages)
        elif isinstance(parts.get(name), PreTrainedConfig):
            wanted[name] = configuration(type(parts[name]), width, complete).to_dict()
        elif complete and value is None and name in _MISSING:
            wanted[name] = _MISSING[name]
        elif name not in ("model_type", "transformers_version", "architectures", "dtype"):
            smaller = _smaller(name, value, layers, width)
            if smaller != value:
                wanted[name] = smaller
    heads, groups = given.get("num_attention_heads"), given.get("num_key_value_heads")
    if heads is not None and heads == groups and "num_attention_heads" in wanted:
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    return kind(**wanted)


def made(kind: type[PreTrainedModel], width: int, complete: bool) -> Any:
    """The model, eager, in float32, not training, always the same; ValueError: it is too large."""
    chosen = configuration(kind.config_class, width, complete)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind._from_config(chosen).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = kind._from_config(
        configuration(kind.config_class, width, complete), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        # As they come, weights are so small that attention hardly depends on the scores.
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(3)
    return model.float()


def _number(config: Any, *names: str, otherwise: int) -> int:
    """The first of the names that the configuration, or a part of it for images or sound, has."""
    parts = [config, *(getattr(config, name, None) for name in ("vision_config", "audio_config"))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int):
                return value
    return otherwise


def inputs(model: Any) -> Iterator[dict[str, Any]]:
    """What the model may eat, likeliest first; texts without a mask."""
    generator = torch.Generator().manual_seed(1)
    config, asked = model.config, inspect.signature(model.forward).parameters
    main = model.main_input_name
    try:
        known = min(90, model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        known = 90
    ids = torch.randint(min(5, known - 2), known, (BATCH, LENGTH), generator=generator)
    given: dict[str, Any] = {}

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if "decoder_input_ids" in asked:
        given["decoder_input_ids"] = ids
    if "bbox" in asked:
        given["bbox"] = torch.zeros((BATCH, LENGTH, getattr(config, "dim_bbox", 4)))
        if config.model_type != "bros":
            given["bbox"] = given["bbox"].long()
    if "visual_feats" in asked:
        given["visual_feats"] = some(BATCH, 5, config.visual_feat_dim)
        given["visual_pos"] = some(BATCH, 5, config.visual_pos_dim)
    if "returns_to_go" in asked:
        yield {
            "states": some(BATCH, 4, config.state_dim),
            "actions": some(BATCH, 4, config.act_dim),
            "rewards": torch.zeros((BATCH, 4, 1)),
            "returns_to_go": torch.zeros((BATCH, 4, 1)),
            "timesteps": torch.arange(4).expand(BATCH, -1),
            "attention_mask": torch.ones((BATCH, 4)),
        }
    if "past_time_features" in asked:
        past = config.context_length + max(config.lags_sequence)
        features = config.num_time_features
        yield {
            "past_values": some(BATCH, past),
            "past_time_features": some(BATCH, past, features),
            "past_observed_mask": torch.ones(BATCH, past),
            "future_values": some(BATCH, config.prediction_length),
            "future_time_features": some(BATCH, config.prediction_length, features),
        }
    if "input_ids" in asked:
        yield {"input_ids": ids, **given}
        yield {"input_ids": ids}
        if isinstance(end := getattr(config, "eos_token_id", None), int):
            yield {"input_ids": torch.cat((ids[:, :-1], torch.full((BATCH, 1), end)), 1)}
        yield {"input_ids": torch.stack((ids, ids.flip(0)), 1)}  # choices
    channels = _number(config, "num_channels", "in_channels", "in_chans", otherwise=3)
    size = _number(config, "image_size", "img_size", otherwise=IMAGE)
    frames = _number(config, "num_frames", "frames", "frames_per_clip", otherwise=2)
    mels = _number(config, "num_mel_bins", "feature_size", "input_dim", "num_mels", otherwise=80)
    long = 2 * _number(config, "max_source_positions", otherwise=50)
    candidates: dict[str, list[torch.Tensor]] = {
        "pixel_values": [
            some(BATCH, channels, size, size),
            some(BATCH, frames, channels, size, size),
            some(BATCH, channels, 64, 64),
            some(BATCH, channels, 224, 224),
            some(BATCH, channels, frames, size, size),
        ],
        "pixel_values_videos": [some(BATCH, frames, channels, size, size)],
        "input_values": [some(BATCH, 4000), some(BATCH, 1, 4000), some(BATCH, 1024, 128)],
        "input_features": [
            some(BATCH, mels, long),
            some(BATCH, long, mels),
            some(BATCH, 1, 64, 64),
        ],
        "inputs_embeds": [some(BATCH, LENGTH, _number(config, "hidden_size", otherwise=64))],
        "hidden_states": [some(BATCH, LENGTH, _number(config, "hidden_size", otherwise=64))],
        "input_ids": [ids],
        "past_values": [some(BATCH, 64), some(BATCH, 64, 1)],
        "spectrogram": [some(BATCH, 20, mels)],
        "inputs": [ids],
    }
    if "grid_thw" in asked:
        patch, time = (
            _number(config, name, otherwise=2) for name in ("patch_size", "temporal_patch_size")
        )
        values = some(32, channels * patch * patch * time)
        grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
        for flat in (values, values[None], values.view(32, channels, time, patch, patch)):
            yield {main if main in asked else "hidden_states": flat, "grid_thw": grid}
            yield {"hidden_states": flat, "grid_thw": grid}
            yield {"pixel_values": flat, "grid_thw": grid}
    for name in (main, *candidates):
        if name in asked:
            for value in candidates.get(name, []):
                yield {name: value, **given}
                if "input_ids" in asked and name != "input_ids":
                    yield {name: value, "input_ids": ids, **given}
