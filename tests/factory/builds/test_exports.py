"""A library whose functions are hidden is refused when it is linked, with the line to add."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fake_artifacts
import pytest

from flashvar_factory.build import exports
from flashvar_factory.errors import BuildError

PLAIN = fake_artifacts.library(fake_artifacts.manifest())


def check(folder: Path, exported: tuple[str, ...]) -> None:
    library, plan = folder / "libflashvar_sm80.so", folder / "plan.json"
    library.write_bytes(replace(PLAIN, exported=exported).build())
    plan.write_text(
        json.dumps({"project": "flashvar", "kernels": [{"op": "attention_fwd"}]}), encoding="utf-8"
    )
    exports.check(plan, library)


def test_everything_is_exported(tmp_path: Path) -> None:
    check(tmp_path, PLAIN.exported)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_hidden_functions_are_named(count: int, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r'visibility\("default"\)') as caught:
        check(tmp_path, PLAIN.exported[:count])
    assert "flashvar_attention_fwd" in str(caught.value)
    assert ("found none" in str(caught.value)) == (count == 0)
