"""Programs in a fresh interpreter, which finds flashvar and has nothing loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashvar

SOURCES = Path(flashvar.__file__).parents[1]


def run_python(
    *arguments: str, program: str = sys.executable, home: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds flashvar and nothing of this test run."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in [name for name in environment if name.startswith("FLASHVAR_")]:
        del environment[name]
    if home is not None:
        environment["HOME"] = home
    command = [program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def evaluate(code: str, program: str = sys.executable, home: str | None = None) -> Any:
    """What the last line of `code` prints as JSON in a fresh interpreter."""
    finished = run_python("-c", code, program=program, home=home)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)
