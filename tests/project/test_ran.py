"""What variants.toml says of where each binary's tests have run is what the records say."""

from __future__ import annotations

import json
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
        for one in gpu_runs.read(ROOT, CONFIG)
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


@pytest.mark.parametrize(
    ("capability", "forced", "kind", "native"),
    [
        ([12, 0], None, "sm_120", True),
        ([12, 1], None, "sm_120", True),
        ([10, 3], None, "sm_100", True),
        ([12, 1], "sm_120-cu12", "sm_120-cu12", True),
        ([8, 9], "sm_86", "sm_86", False),
        ([9, 0], "sm_80", "sm_80", False),
    ],
)
def test_a_gpu_without_a_wheel_of_its_own_runs_the_one_that_is_also_for_it(
    capability: list[int], forced: str | None, kind: str, native: bool, tmp_path: Path
) -> None:
    devices = [{"name": "NVIDIA GPU", "capability": capability}]
    made = {
        "left_to_other_shards": 0,
        "forced_architecture": forced,
        "system": {"devices": devices, "platform": "linux_aarch64", "interpreted": False},
        "binaries": [],
        "counts": {"passed": 2},
        "counts_by_file": {"test_a.py cuda": {"passed": 2}},
    }
    path = tmp_path / gpu_runs.FOLDER / "made.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(made), encoding="utf-8")
    (read,) = gpu_runs.read(tmp_path, CONFIG)
    assert (read.kind, read.native) == (kind, native)
