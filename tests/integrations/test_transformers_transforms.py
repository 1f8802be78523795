"""Models of transformers where masks and positions have no values: under vmap, and while traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import VOCABULARY, small_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from flashvar.integrations import transformers

LENGTH = 9
# As many rows as there are entries in the batch.
PADDING = torch.tensor([[0] * 4 + [1] * 5, [1] * 6 + [0] * 3, [1] * 9])


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.register()
    monkeypatch.setenv("FLASHVAR_STRICT", "1")


def model_of(name: str) -> Any:
    model = small_model(name, LENGTH)
    model.set_attn_implementation("flashvar")
    return model


def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, VOCABULARY, PADDING.shape, generator=generator)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_gradients_of_each_row_under_vmap(name: str) -> None:
    model = model_of(name)
    weights = dict(model.named_parameters())

    def loss(weights: Any, row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        given = {"attention_mask": mask[None], "use_cache": False}
        logits = functional_call(model, weights, (row[None],), given).logits[0]
        return (logits.log_softmax(-1)[:, 1] * mask).sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, ids(), PADDING)
    for index, (row, mask) in enumerate(zip(ids(), PADDING, strict=True)):
        for key, one in grad(loss)(weights, row, mask).items():
            torch.testing.assert_close(found[key][index], one, rtol=1e-4, atol=1e-5)


def test_a_traced_mask() -> None:
    model = model_of("llama")

    def logits(row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(row[None], attention_mask=mask[None], use_cache=False).logits
        return found[0][mask.bool()]

    with torch.no_grad():
        graph = make_fx(logits)(ids()[0], PADDING[0])
        # As many tokens are not padding, in other places.
        mask = PADDING[0].flip(0)
        torch.testing.assert_close(graph(ids()[1], mask), logits(ids()[1], mask))


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("given", [{}, {"position_ids": torch.arange(LENGTH)[None]}], ids=str)
def test_positions_of_fake_tensors(name: str, given: dict[str, torch.Tensor]) -> None:
    model = model_of(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        options = {key: mode.from_tensor(value) for key, value in given.items()}
        logits = model(mode.from_tensor(ids()[:1]), use_cache=False, **options).logits
    assert logits.shape == (1, LENGTH, VOCABULARY)
