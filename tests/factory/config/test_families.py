"""What the sources of a family compile for: beyond it, one sentence instead of pages of ptxas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashvar.errors import ConfigurationError
from flashvar_factory.config import schema

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "variants.toml").read_text(encoding="utf-8")
LINE = 'code = "{code}", family = "{family}", shared_memory = 65536, distribution = "x"'


def architecture(code: str, family: str) -> str:
    """The project's file with one more architecture."""
    name = f"sm_{code.rstrip('a')}"
    line = LINE.format(code=code, family=family)
    return TEXT.replace("\nsm_80 =", f"\n{name} = {{ {line} }}\nsm_80 =", 1)


MISTAKES = {
    "below its family": (
        architecture("75", "sm80"),
        "sm_75.code: expected code '80' or higher, which family sm80 begins with, found '75'",
    ),
    "of another family": (
        architecture("103a", "sm90"),
        "sm_103.code: expected code '90a', the only one that family sm90 compiles for",
    ),
    "not the specific code": (
        TEXT.replace('code = "90a", family', 'code = "90", family'),
        "sm_90.code: expected code '90a', the only one that family sm90 compiles for, found '90'",
    ),
    "axis": (
        TEXT.replace("max = 256", "max = 512"),
        "ops.attention_fwd.axes.head_dim.max: expected 256 or lower, which family sm80",
    ),
    "limit of no axis": (
        TEXT.replace("largest = { head_dim", "largest = { head_dims", 1),
        "families.sm80.largest.head_dims: unknown key, expected",
    ),
    "unknown key": (
        TEXT.replace('sm80 = { min = "80"', 'sm80 = { mini = "80"'),
        "families.sm80.mini: unknown key, expected largest, min, only",
    ),
    "code that is none": (
        TEXT.replace('sm80 = { min = "80"', 'sm80 = { min = "eighty"'),
        "families.sm80.min: expected a compute capability",
    ),
    "spills as text": (
        re.sub(r"\nspill_bytes = \d+", '\nspill_bytes = "x"', TEXT, count=1),
        "ops.attention_bwd.spill_bytes: expected an integer",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_mistake(text: str, sentence: str) -> None:
    assert text != TEXT
    with pytest.raises(ConfigurationError) as caught:
        schema.parse(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", ["88", "130", "90"])
def test_a_family_serves_what_is_newer(code: str) -> None:
    text = architecture(code, "sm80") if code != "90" else TEXT
    assert f"sm_{code}" in schema.parse(text).targets
