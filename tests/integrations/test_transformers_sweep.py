"""Classes of the sweep over transformers' models, judged again: one of each mechanism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from sweep_transformers import TABLE, judge, line, word

from flashvar.integrations import transformers as integration

TOLD = TABLE.read_text(encoding="utf-8").splitlines()
# Mask and flag of a layer that disagree; layers that read masks; tables of attention classes; a
# list of flash attentions; chunks; no call at all; keys selected by indices; sinks.
CLASSES = (
    "AlignTextModel",
    "BloomModel",
    "ClapTextModel",
    "Data2VecVisionModel",
    "DebertaV2Model",
    "DeepseekV3Model",
    "DeepseekV32Model",
    "DogeModel",
    "FalconModel",
    "GPTJModel",
    "GPTNeoModel",
    "GitModel",
    "GptOssModel",
    "Llama4TextModel",
    "MambaModel",
    "PegasusXModel",
    "SamVisionModel",
    "SplinterModel",
    "XLMModel",
)


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


@pytest.mark.skipif(
    TOLD[0].split()[1].rstrip(",") != transformers.__version__,
    reason="the table is of another version of transformers",
)
@pytest.mark.parametrize("name", CLASSES)
def test_the_table_is_true(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kind: Any = getattr(transformers, name)
    try:
        assert line(name, judge(kind)) in TOLD
    finally:
        torch.set_num_threads(threads)


# Eager attention adds a boolean mask to the scores as 0 and 1, where others take it for a mask; and
# an encoder that shortens its sequence takes no mask for it, and raises.
EXPLAINED = {
    "GroundingDinoForObjectDetection": "differs",
    "GroundingDinoModel": "differs",
    "InformerForPrediction": "fails",
    "InformerModel": "fails",
    "MMGroundingDinoForObjectDetection": "differs",
    "MMGroundingDinoModel": "differs",
}


def test_nothing_else_differs_from_eager() -> None:
    words = {text.split()[0]: word(text) for text in TOLD[3:] if text}
    good = {"served", "as sdpa", "in part", "own", "refused", "no attention", "not run"}
    assert {name: word for name, word in words.items() if word not in good} == EXPLAINED
    assert len(words) > 1000
