"""An index takes every distribution: `twine check --strict` has nothing against its metadata."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("twine") is None, reason="twine, of the group `test`, is not here")
def test_every_distribution(dist: Path) -> None:
    files = sorted(str(path) for path in dist.iterdir())
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == len(files)
