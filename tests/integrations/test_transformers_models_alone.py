"""Models that transformers' flags misjudge, and models that flashvar's attention never sees."""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as upstream

from flashvar.errors import BackendUnavailableError
from flashvar.integrations import fallback
from flashvar.integrations.transformers import attention as transformers_attention
from flashvar.integrations.transformers import (
    model_check as transformers_check,
)
from flashvar.integrations.transformers import (
    registration as transformers,
)

LENGTH = 12
_SIZES = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
_TEXT = {**_SIZES, "intermediate_size": 32}
_IMAGE = {**_TEXT, "image_size": 32, "patch_size": 8}
del _IMAGE["vocab_size"]
# Their layers have no flag of causality, which transformers then takes for set.
BIDIRECTIONAL = {
    "AlignTextModel": _TEXT,
    "ClapTextModel": _TEXT,
    "SplinterModel": _TEXT,
}
# Files of older versions, and newer torch.
_OLDER = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
# The attention of a whole model is its own, with what is said of it.
OWN: dict[str, tuple[dict[str, Any], str]] = {
    "DebertaV2Model": (_TEXT, r"DisentangledSelfAttention\) compute attention themselves"),
    "XLMModel": (
        {"vocab_size": 97, "emb_dim": 64, "n_layers": 2, "n_heads": 4},
        r"\(MultiHeadAttention\) compute attention themselves",
    ),
    "BloomModel": (
        {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        r"\(BloomAttention\) compute attention themselves",
    ),
    "FalconModel": (_SIZES, "choose among attention classes of their own"),
    "GPTNeoModel": (
        {
            "vocab_size": 97,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        "choose among attention classes of their own",
    ),
    "GitModel": (
        {**_TEXT, "vision_config": _IMAGE},
        "choose among attention classes of their own",
    ),
    "Data2VecVisionModel": (_IMAGE, "choose among attention classes of their own"),
    "SamVisionModel": (
        {**_IMAGE, "output_channels": 16, "window_size": 2, "global_attn_indexes": [1]},
        "choose among attention classes of their own",
    ),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.register()
    monkeypatch.setattr(fallback, "_logged", set())


def made(name: str, options: dict[str, Any], by: str = "flashvar") -> Any:
    kind = getattr(upstream, name)
    torch.manual_seed(0)
    config = kind.config_class(**copy.deepcopy(options))
    model = kind._from_config(config, attn_implementation=by).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(3)
    return model


def eaten(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn((2, 3, 32, 32), generator=generator)}
    return {"input_ids": torch.randint(3, 97, (2, LENGTH), generator=generator)}


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_bidirectional_layers_without_a_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    expected, found = (made(name, BIDIRECTIONAL[name], by) for by in ("eager", "flashvar"))
    given = eaten(found)
    torch.testing.assert_close(found(**given)[0], expected(**given)[0], rtol=1e-4, atol=1e-4)


def test_a_flag_that_says_causal_of_a_layer_without_a_mask() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = {**sizes, "vocab_size": 97, "intermediate_size": 32}
    image = {**sizes, "image_size": 32, "patch_size": 8}
    options = {**sizes, "text_config": text, "vision_config": image}
    eager, model = (made("BridgeTowerModel", options, by) for by in ("eager", "flashvar"))
    generator = torch.Generator().manual_seed(1)
    given = {
        "input_ids": torch.randint(3, 97, (2, LENGTH), generator=generator),
        "pixel_values": torch.randn((2, 3, 32, 32), generator=generator),
    }
    for found, expected in zip(model(**given)[:3], eager(**given)[:3], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_decoder_whose_flag_says_not_causal() -> None:
    sizes = {"d_model": 64, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 97}
    layers = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers",)}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    options = {**sizes, **layers, **heads, "block_size": 4, "num_global_tokens": 2}
    eager, model = (made("PegasusXModel", options, by) for by in ("eager", "flashvar"))
    given = eaten(model)
    decoder = given["input_ids"].flip(1)
    found = model(**given, decoder_input_ids=decoder)[0]
    expected = eager(**given, decoder_input_ids=decoder)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    decoder = torch.cat((decoder[:, :-1], decoder[:, -1:] + 1), 1)
    changed = model(**given, decoder_input_ids=decoder)[0]
    assert torch.equal(changed[:, 0], found[:, 0])
    assert not torch.equal(changed[:, -1], found[:, -1])


@_OLDER
@pytest.mark.parametrize("name", OWN)
def test_attention_of_its_own_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    options, said = OWN[name]
    with caplog.at_level(logging.WARNING, "flashvar"):
        model = made(name, options)
        given = eaten(model)
        found = model(**given)[0]
        model(**given)
    expected = made(name, options, "eager")(**given)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    messages = [record.message for record in caplog.records if record.name == "flashvar"]
    assert len([message for message in messages if message.startswith(f"{name}: ")]) == 1
    assert all(re.search(said, message) for message in messages)


@_OLDER
@pytest.mark.parametrize("name", OWN)
def test_strict_mode_is_not_silent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    options, said = OWN[name]

    def load_and_run() -> None:
        model = made(name, options)
        model(**eaten(model))

    with pytest.raises(BackendUnavailableError, match=said):
        load_and_run()


@_OLDER
def test_models_that_cannot_be_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("DebertaV2Model", _TEXT, "eager")
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    with pytest.raises(BackendUnavailableError, match=r"DebertaV2Model: .*STRICT=1"):
        model.set_attn_implementation("flashvar")


def test_a_list_of_flash_attentions_does_not_keep_ours_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    options = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    options |= {"num_experts_per_tok": 1, "sliding_window": 4}
    expected, found = (made("GptOssModel", options, by) for by in ("eager", "flashvar"))
    given = eaten(found)
    torch.testing.assert_close(found(**given)[0], expected(**given)[0], rtol=1e-4, atol=1e-4)


def test_nothing_is_left_on_a_model_that_ran() -> None:
    model = made("LlamaForCausalLM", _TEXT)
    assert model._forward_hooks
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(**eaten(one))
        assert not any(module._forward_hooks for module in one.modules())
        assert not any(module._forward_pre_hooks for module in one.modules())


def test_an_error_in_a_forward_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    model = made("BloomModel", OWN["BloomModel"][0])
    with pytest.raises(IndexError):
        model(torch.full((1, 4), 1000))
    assert transformers_check.here.running == []
    assert not caplog.records
    model(**eaten(model))
    assert "compute attention themselves" in caplog.text


def in_a_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_forwards_of_other_threads(caplog: pytest.LogCaptureFixture) -> None:
    """One whose attention is flashvar's is over while another computes its own, which is said."""
    own, served = made("BloomModel", OWN["BloomModel"][0]), made("LlamaForCausalLM", _TEXT)
    given = eaten(served)
    own.h[0].register_forward_hook(lambda *_: in_a_thread(lambda: served(**given)))
    own(**eaten(own))
    assert re.findall(r"(\w+): its layers", caplog.text) == ["BloomModel"]
    assert transformers_check.here.running == []


def test_a_forward_that_is_over_in_another_thread_first(caplog: pytest.LogCaptureFixture) -> None:
    served, own = made("LlamaForCausalLM", _TEXT), made("BloomModel", OWN["BloomModel"][0])
    given = eaten(served)
    once = served.lm_head.register_forward_hook(
        lambda *_: (once.remove(), in_a_thread(lambda: served(**given)))[1]
    )
    served(**given)
    own(**eaten(own))
    assert re.findall(r"(\w+): its layers", caplog.text) == ["BloomModel"]


def test_a_model_that_changes_its_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for eager attention, it does not meet flashvar's again, nor is that an error."""
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    model = made("LlamaForCausalLM", _TEXT)
    before = model(**eaten(model)).logits
    model.set_attn_implementation("eager")
    monkeypatch.setattr(transformers_attention, "_by_flashvar", None)  # to call it would fail
    torch.testing.assert_close(model(**eaten(model)).logits, before)
    assert transformers_check.here.running == []
