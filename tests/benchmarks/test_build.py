"""The copy of the sources that `run.py build` times is one that the factory works in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import build

ROOT = Path(__file__).parents[2]


def test_the_factory_runs_in_a_copy(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    build.copy_sources(ROOT, tree)
    assert not (tree / "tests").exists()
    done = subprocess.run(
        [sys.executable, "-m", "flashvar_factory", "list", "sm80", "hdim=64"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src" / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "attention_fwd_bf16_hdim64" in done.stdout
