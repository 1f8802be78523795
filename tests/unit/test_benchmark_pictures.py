"""Pictures are drawn from what a benchmark wrote, one pair for each direction in it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")


def draw(document: dict[str, object], folder: Path) -> subprocess.CompletedProcess[str]:
    source = folder / "rates.json"
    source.write_text(json.dumps(document), encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmarks" / "draw.py"), str(source), "--out"]
    return subprocess.run([*command, str(folder / "out")], capture_output=True, text=True)


def rows(direction: str) -> list[dict[str, object]]:
    return [
        {
            "direction": direction,
            "contender": contender,
            "head_dim": 64,
            "causal": causal,
            "seqlen": seqlen,
            "tflops": 100.0 + seqlen / 100,
        }
        for contender in ("sdpa-flash", "flashvar-cuda")
        for causal in (False, True)
        for seqlen in (1024, 4096)
    ]


def test_both_directions(tmp_path: Path) -> None:
    document = {
        "environment": {"device": {"name": "a card"}},
        "rows": [
            *rows("forward"),
            *rows("backward"),
            {"direction": "forward", "contender": "flex"},
        ],
    }
    done = draw(document, tmp_path)
    assert done.returncode == 0, done.stderr
    names = {
        f"attention-{direction}-{kind}.{ending}"
        for direction in ("forward", "backward")
        for kind in ("rates", "ratios")
        for ending in ("png", "svg")
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert all(path.stat().st_size > 1000 for path in (tmp_path / "out").iterdir())


def test_nothing_measured_is_nothing_drawn(tmp_path: Path) -> None:
    done = draw({"environment": {"device": {"name": "a card"}}, "rows": []}, tmp_path)
    assert done.returncode == 2
    assert "measure first" in done.stdout
