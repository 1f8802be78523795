"""A Python process in which Triton's interpreter runs the kernels, on the CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "python"


def interpreted(python: str, *arguments: str) -> str:
    """What it prints."""
    finished = subprocess.run(
        [python, *arguments],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (SOURCES, TESTS))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
