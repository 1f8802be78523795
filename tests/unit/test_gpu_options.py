"""A GPU test run that was promised a device fails where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_required_device_that_is_not_there_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu/test_attention_runtime.py", "--require-device"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4  # pytest's own, of a usage error
    assert "--require-device: torch sees no CUDA device" in done.stderr
