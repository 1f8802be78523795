"""Models of transformers on flashvar give what they give on eager attention, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import cases, inputs, small_model, with_gradients

from flashvar.errors import BackendUnavailableError
from flashvar.integrations.transformers import (
    attention as transformers_attention,
)
from flashvar.integrations.transformers import (
    registration as transformers,
)

LENGTH = 18


@pytest.fixture(autouse=True)
def registered() -> None:
    transformers.register()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")


def assert_like_eager(
    model: Any, given: dict[str, Any], counts: torch.Tensor, name: str = "flashvar"
) -> None:
    expected, wanted = with_gradients(model, given, counts)
    model.set_attn_implementation(name)
    found, grads = with_gradients(model, given, counts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert grads.keys() == wanted.keys()
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for parameter, grad in grads.items():
        torch.testing.assert_close(grad, wanted[parameter], rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("name", "padding"), cases())
def test_logits_and_gradients(name: str, padding: str) -> None:
    assert_like_eager(small_model(name, LENGTH), *inputs(name, LENGTH, padding))


@pytest.mark.parametrize(("name", "padding"), cases())
def test_own_path(name: str, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise BackendUnavailableError("not today")

    monkeypatch.setattr(transformers_attention, "_by_flashvar", refuse)
    assert_like_eager(small_model(name, LENGTH), *inputs(name, LENGTH, padding))


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("padding", ["none", "left"])
def test_checkpointed_layers(padding: str) -> None:
    """Layers that run again in the backward, with the mask of the first time."""
    model = small_model("mistral", LENGTH).train()
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)()
    assert_like_eager(model, *inputs("mistral", LENGTH, padding))
