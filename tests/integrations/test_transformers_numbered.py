"""Masks of numbered sequences with padding: the same keys as in eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import CACHE
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
    sliding_window_overlay,
)

from flashvar.integrations import transformers as transformers
from flashvar.integrations.transformers.attention import attention

BATCH, HEADS, LENGTH, DIM = 2, 2, 8, 16
NUMBERS = {
    "in order": [[0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 3, 3, 3]],
    "one each": [[0] * 8, [1] * 8],
    "out of order": [[2, 2, 2, 0, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0, 2, 2]],
    "negative": [[0, 0, 0, 1, 1, 1, -1, -1], [-1, -1, 0, 0, 0, 0, 0, 0]],
}
PADDING = {
    "none": None,
    "left": [[1] * 8, [0, 0, 1, 1, 1, 1, 1, 1]],
    "right": [[1] * 8, [1, 1, 1, 1, 1, 1, 0, 0]],
    "inside": [[1] * 8, [1, 1, 0, 1, 1, 1, 1, 1]],
}


class Layer(torch.nn.Module):  # type: ignore[misc]
    """What attention functions read of a layer."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.is_causal, self.num_key_value_groups = causal, 1


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_numbered_sequences(
    causal: bool, window: int | None, numbers: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers.register()
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding])
    config = LlamaConfig(hidden_size=HEADS * DIM, num_attention_heads=HEADS)
    same = packed_sequence_mask_function(torch.tensor(NUMBERS[numbers]))
    seen = same if window is None else and_masks(same, sliding_window_overlay(window))
    torch.manual_seed(0)
    given = torch.randn(3, BATCH, HEADS, LENGTH, DIM)
    found = {}
    for name, call in (("sdpa", sdpa_attention_forward), ("flashvar", attention)):
        config._attn_implementation = name
        options: dict[str, Any] = {CACHE: None} if causal else {}
        created = (create_causal_mask if causal else create_bidirectional_mask)(
            config, torch.zeros(BATCH, LENGTH, 1), mask, and_mask_function=seen, **options
        )
        found[name] = call(Layer(causal), *given, created, scaling=1.0)[0]
    rows = torch.ones(BATCH, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(found["flashvar"][rows], found["sdpa"][rows])
