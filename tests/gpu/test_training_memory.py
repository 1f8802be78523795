"""A training step takes no more memory than with torch's own attention."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from device_call import DEVICE, skip_unless_compiled

pytest.importorskip("transformers", reason="the package transformers is not installed")

import training_memory as memory

from flashvar.integrations.transformers import attention as transformers_attention

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(DEVICE == "cpu", reason="counts the CUDA allocator's bytes"),
]
# What the allocator rounds, and a log-sum-exp in another shape.
SLACK = 2**20
LAYERS = 2


@pytest.mark.parametrize("loss", memory.LOSSES)
@pytest.mark.parametrize("precision", memory.PRECISIONS)
@pytest.mark.parametrize("attention", memory.ATTENTIONS[1:])
def test_no_more_than_sdpa(
    attention: str, precision: str, loss: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for op in ("attention_fwd", "attention_bwd"):
        skip_unless_compiled(backend, torch.bfloat16, 64, op)
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    dense = partial(transformers_attention.dense, backend=backend)
    monkeypatch.setattr(transformers_attention, "dense", dense)
    found = []
    for one in ("sdpa", attention):
        found.append(memory.measured(one, precision, loss, LAYERS, backend=backend))
        gc.collect()
        torch.cuda.empty_cache()
    by_torch, by_ours = found
    assert by_ours["kept"] <= by_torch["kept"] + SLACK
    assert by_ours["peak"] <= by_torch["peak"] + SLACK
