"""The words of a selection: short, checked, and with an error that lists what is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashvar.errors import ConfigurationError
from flashvar_factory import schema
from flashvar_factory.words import Words, parse

CONFIG = schema.read(Path(__file__).parents[2] / "variants.toml")

SPOKEN = {
    "": Words(),
    "hdim=64": Words(axes={"head_dim": (64,)}),
    "head_dim=128,64": Words(axes={"head_dim": (64, 128)}),
    "hdim=all": Words(axes={"head_dim": CONFIG.axes["head_dim"]}),
    "dtype=bf16 op=attention_fwd": Words(ops=("attention_fwd",), axes={"dtype": ("bf16",)}),
    "arch=native": Words(architectures=("native",)),
    "arch=sm_80,89": Words(architectures=("sm_80", "sm_89")),
    "sm89": Words(architectures=("sm_89",)),
    "flashvar-sm90": Words(architectures=("sm_90",)),
    "all": Words(architectures=tuple(CONFIG.targets)),
    "ptx=1 jobs=3 toolkit=pypi": Words(ptx=True, jobs=3, toolkit="pypi"),
}


@pytest.mark.parametrize("text", SPOKEN)
def test_understood(text: str) -> None:
    assert parse(text.split(), CONFIG) == SPOKEN[text]


REFUSED = {
    "hdmi=64": ["unknown word 'hdmi'", "did you mean 'hdim'", "dtype", "jobs"],
    "hdim=65": ["head_dim=65", "32, 64, 96"],
    "hdim=": ["hdim=", "expected a value"],
    "dtype=bf61": ["dtype=bf61", "did you mean 'bf16'"],
    "op=attention_fdw": ["did you mean 'attention_fwd'"],
    "arch=sm_79": ["unknown architecture 'sm_79'", "sm_80", "native", "all"],
    "sm98": ["unknown architecture 'sm98'"],
    "ptx=yes": ["ptx=yes", "0, 1"],
    "jobs=0": ["jobs=0", "above 0"],
    "jobs=many": ["jobs=many"],
    "toolkit=conda": ["toolkit=conda", "pypi"],
    "hdim=64 head_dim=32": ["said before"],
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text.split(), CONFIG)
    missing = [word for word in REFUSED[text] if word not in str(caught.value)]
    assert not missing, str(caught.value)
