"""Models of transformers on the device: no further from float32 than eager attention is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from device_call import DEVICE, skip_unless_compiled

pytest.importorskip("transformers", reason="the package transformers is not installed")

from small_models import (
    DECODERS,
    MODELS,
    WITH_EXPERTS,
    cases,
    inputs,
    small_model,
    with_gradients,
)

from flashvar.integrations import fallback
from flashvar.integrations.transformers import (
    attention as transformers_attention,
)
from flashvar.integrations.transformers import (
    fallback as transformers_fallback,
)
from flashvar.integrations.transformers import (
    registration as transformers,
)

LENGTH = 150
DTYPES = [torch.bfloat16, torch.float16]
CASES = [case for case in cases() if case[0] not in WITH_EXPERTS]
Results = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(autouse=True)
def registered(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This backend and no other, nor the model's own path."""
    transformers.register()
    monkeypatch.setattr(transformers_attention, "fall_back", _refuse)
    for name in ("dense", "attention_varlen"):
        function = getattr(transformers_attention, name)
        monkeypatch.setattr(transformers_attention, name, partial(function, backend=backend))


def _refuse(reason: str, *_: object) -> None:
    raise AssertionError(f"the model's own path was taken: {reason}")


def require(backend: str, name: str, dtype: torch.dtype) -> None:
    head_dim = -(-MODELS[name].head_dim // 8) * 8
    for op in ("attention_fwd", "attention_bwd"):
        skip_unless_compiled(backend, dtype, head_dim, op)


def results(model: Any, given: dict[str, Any], counts: torch.Tensor) -> Results:
    """The output and all gradients, in float64."""
    out, grads = with_gradients(model, given, counts)
    return {"output": out.double(), **{name: grad.double() for name, grad in grads.items()}}


def on_device(model: Any, given: dict[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    moved = {
        name: value.to(DEVICE, dtype if value.is_floating_point() else None)
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    }
    return model.to(DEVICE, dtype), {**given, **moved}


def assert_near(found: Results, eager: Results, exact: Results) -> None:
    """Within twice eager's error, over all elements of a tensor; the output, and each gradient.

    Gradients that are zero but for rounding (of biases of keys) are held to the largest one's.
    """
    assert found.keys() == eager.keys() == exact.keys()
    largest = max(float(exact[name].norm()) for name in exact if name != "output")
    for name in exact:
        error, allowed = ((one[name] - exact[name]).norm() for one in (found, eager))
        assert found[name].isfinite().all(), name
        floor = 1e-3 * (exact[name].norm() if name == "output" else largest)
        assert error <= 2 * allowed + floor, f"{name}: {error:.3g}, eager {allowed:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_logits_and_gradients(name: str, padding: str, backend: str, dtype: torch.dtype) -> None:
    require(backend, name, dtype)
    given, counts = inputs(name, LENGTH, padding)
    exact = results(*on_device(small_model(name, LENGTH), given, torch.float32), counts)
    model, given = on_device(small_model(name, LENGTH), given, dtype)
    eager = results(model, given, counts)
    model.set_attn_implementation("flashvar")
    assert_near(results(model, given, counts), eager, exact)


@pytest.mark.parametrize("name", sorted({*DECODERS}.difference(WITH_EXPERTS)))
def test_packed(name: str, backend: str) -> None:
    """Against eager attention with transformers' mask of packed sequences."""
    require(backend, name, torch.bfloat16)
    given, counts = inputs(name, LENGTH, "none")
    lengths = (70, 1, 50, 29)
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = {"input_ids": given["input_ids"], "position_ids": positions.expand(2, -1)}
    exact = results(*on_device(small_model(name, LENGTH), packed, torch.float32), counts)
    model, packed = on_device(small_model(name, LENGTH), packed, torch.bfloat16)
    eager = results(model, packed, counts)
    model.set_attn_implementation("flashvar")
    assert_near(results(model, packed, counts), eager, exact)


def test_autocast(backend: str) -> None:
    """Weights in float32, and what autocast lowers on flashvar."""
    require(backend, "llama", torch.bfloat16)
    given, counts = inputs("llama", LENGTH, "left")
    model, given = on_device(small_model("llama", LENGTH), given, torch.float32)
    exact = results(model, given, counts)
    with torch.autocast(DEVICE, torch.bfloat16):
        eager = results(model, given, counts)
        model.set_attn_implementation("flashvar")
        assert_near(results(model, given, counts), eager, exact)


def test_float32_goes_the_models_own_way(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No kernel takes it; the reference does."""
    monkeypatch.setattr(transformers_attention, "fall_back", transformers_fallback.fall_back)
    monkeypatch.setattr(fallback, "_logged", set())
    given, counts = inputs("mistral", LENGTH, "left")
    model, given = on_device(small_model("mistral", LENGTH), given, torch.float32)
    exact = results(model, given, counts)
    model.set_attn_implementation("flashvar")
    for name, found in results(model, given, counts).items():
        assert (found - exact[name]).norm() <= 1e-3 * exact[name].norm(), name
    said = [record.message for record in caplog.records if "such calls take" in record.message]
    assert len(said) == (0 if backend == "reference" else 1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_generation(name: str, cache: str, backend: str) -> None:
    """The logits of the tokens that the float32 model gives, each from the cache before it."""
    require(backend, name, torch.bfloat16)
    given, _ = inputs(name, LENGTH, "left")
    new = 12
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "disable_compile": True}
    model, exact_given = on_device(small_model(name, LENGTH), given, torch.float32)
    tokens = model.generate(**exact_given, **options)
    found = {}
    for attention, dtype in (
        ("exact", torch.float32),
        ("eager", torch.bfloat16),
        ("flashvar", torch.bfloat16),
    ):
        model, moved = on_device(small_model(name, LENGTH), given, dtype)
        if attention == "flashvar":
            model.set_attn_implementation("flashvar")

        def told(batch: int, so_far: torch.Tensor) -> list[int]:
            return [int(tokens[batch, len(so_far)])]

        answer = model.generate(
            **moved,
            **options,
            cache_implementation=cache,
            prefix_allowed_tokens_fn=told,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert answer.sequences.tolist() == tokens.tolist()
        found[attention] = {"output": torch.stack(answer.logits).double(), "none": tokens * 0.0}
    assert_near(found["flashvar"], found["eager"], found["exact"])
