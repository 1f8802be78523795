"""A model of transformers keeps no more for its backward than with torch's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from saved_bytes import kept

from flashvar.integrations import torch as sdpa
from flashvar.integrations import transformers as ours

BATCH, ROWS, HEADS, HEADS_KV, DIM = 2, 64, 4, 2, 16


def llama(attention: str) -> Any:
    configuration = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=HEADS * DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        intermediate_size=96,
    )
    ours.register()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(configuration)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_a_llama_keeps_no_more(precision: str, padded: bool) -> None:
    ids = torch.randint(1, 97, (BATCH, ROWS))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 50:] = 0

    def measured(attention: str, backend: Any = None) -> int:
        model = llama(attention)
        if precision == "bfloat16":
            model.to(torch.bfloat16)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")

        def step() -> torch.Tensor:
            with autocast:
                loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            return loss

        if backend is None:
            return kept(step, *model.parameters())
        with sdpa.activate(backend):
            return kept(step, *model.parameters())

    by_torch = measured("sdpa")
    assert 0 < measured("flashvar") <= by_torch
    assert 0 < measured("sdpa", "reference") <= by_torch
