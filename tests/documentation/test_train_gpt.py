"""The training example: it learns, repeats itself, and judges what it compares."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def test_a_few_steps_on_the_cpu(tmp_path: Path, python_with_models: str) -> None:
    target = tmp_path / "curves.json"
    words = ["--steps", "4", "--batch", "1", "--length", "32", "--json", str(target)]
    words += ["--attention", "sdpa-flash", "--attention", "flashvar-reference"]
    done = subprocess.run(
        [python_with_models, str(EXAMPLE), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src" / "python"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(target.read_text(encoding="utf-8"))
    assert document["text"]["bytes"] > 10**6
    assert len(document["losses"]) == 4
    for first, last in zip(document["losses"][0], document["losses"][3], strict=True):
        assert last < first
    assert [run["near"] for run in document["runs"].values()] == [True, True]


@pytest.mark.parametrize(
    ("losses", "held_out", "near"),
    [
        ([2.0, 1.0], 1.0, True),
        ([2.009, 0.991], 1.0049, True),
        ([2.011, 0.989], 1.0, False),
        ([2.0, 1.0], 1.0051, False),
    ],
    ids=["equal", "near", "mean-too-far", "final-too-far"],
)
def test_what_is_near(
    example: ModuleType, losses: list[float], held_out: float, near: bool
) -> None:
    first = {"losses": [2.0, 1.0], "held_out": 1.0}
    compared = example.compare({"a": first, "b": {"losses": losses, "held_out": held_out}})
    assert compared["a"]["near"]
    assert compared["b"]["near"] is near
