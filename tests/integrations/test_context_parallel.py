"""Integrations inside torch's context_parallel, over two processes: right, or refused in words."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from two_ranks import found_by

from flashvar.integrations import transformers
from flashvar.integrations.torch import attribute as torch_attribute
from flashvar.integrations.transformers import attention as transformers_attention

RIGHT = (
    "transformers",
    "transformers in order",
    "transformers by positions",
    "transformers without masks",
    "a compiled layer",
    "Attend",
    "diffusers",
)
REFUSED = {
    "packed": "padding or packed sequences",
    "packed without masks": "positions that restart",
    "a window": "a sliding window",
    "a window wider than a part": "a sliding window",
    "a mask in a graph": "a mask",
    "softcap": "softcap",
}


@pytest.fixture(scope="module")
def in_parts(
    tmp_path_factory: pytest.TempPathFactory, python_with_models: str
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parts")
    return found_by(python_with_models, "integrations_context_parallel", folder)


@pytest.mark.parametrize("case", RIGHT)
def test_right(case: str, in_parts: list[dict[str, Any]]) -> None:
    for found in in_parts:
        assert max(found[case]) < 1e-5


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, in_parts: list[dict[str, Any]]) -> None:
    for found in in_parts:
        assert f"context_parallel supports, causal or full, found {REFUSED[case]}" in found[case]


def test_other_replacements_leave_models_on_flashvar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who loads a model with flashvar has chosen; a replacement is for those who call torch's."""
    transformers.register()
    q, k, v = torch.randn(3, 1, 2, 6, 8)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    assert torch_attribute.is_replaced_by_others()
    assert not torch_attribute.splits_sequences()
    module: Any = torch.nn.Module()
    found, _ = transformers_attention.attention(module, q, k, v, None, is_causal=False)
    expected = torch_attribute.OWN(q, k, v)
    torch.testing.assert_close(found.transpose(1, 2), expected)


@pytest.mark.parametrize(
    ("dtensor", "expected"),
    [
        pytest.param(SimpleNamespace(), True, id="no dispatcher of this name"),
        pytest.param(SimpleNamespace(_op_dispatcher=object()), True, id="no handlers"),
        pytest.param(
            SimpleNamespace(_op_dispatcher=SimpleNamespace(_custom_op_handlers={})),
            False,
            id="no handler of attention",
        ),
    ],
)
def test_a_torch_that_does_not_say_counts_as_in_parts(
    dtensor: object, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(DTensor=dtensor)
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", module)
    assert not torch_attribute.splits_sequences()  # nothing replaces the function
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda: None)
    assert torch_attribute.splits_sequences() is expected
