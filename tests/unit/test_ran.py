"""What variants.toml says of where each binary's tests have run is what the records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashvar_factory.config import schema
from flashvar_factory.release import gpu_runs

ROOT = Path(__file__).parents[2]
CONFIG = schema.read(ROOT / "variants.toml")


def recorded(name: str) -> str:
    """Where tests of a binary have passed, in the words of variants.toml."""
    mine = [
        one
        for one in gpu_runs.read(ROOT)
        if one.whole and one.kind == name and one.passed.get("cuda") and not one.failed
    ]
    if any(one.native for one in mine):
        return "own"
    return "ptx" if mine else "never"


@pytest.mark.parametrize("name", CONFIG.targets)
def test_records_of_gpu_runs_say_the_same(name: str) -> None:
    assert CONFIG.targets[name].ran == recorded(name)


def test_some_ran_and_some_never_did() -> None:
    assert {one.ran for one in CONFIG.targets.values()} == {"own", "ptx", "never"}
