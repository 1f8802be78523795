"""Models of transformers with linear attention on the stand-ins of fla and causal_conv1d."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from linear_transformers import CHECKS, MODELS

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "python"
PROGRAM = Path(__file__).with_name("linear_transformers.py")


@pytest.fixture(scope="module", params=MODELS)
def found(python_with_models: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """Check -> what was wrong; a process for each model, for transformers keeps what it found."""
    finished = subprocess.run(
        [python_with_models, str(PROGRAM), request.param],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCES, TESTS)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    answers: dict[str, str] = json.loads(finished.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("check", CHECKS)
def test_as_transformers_own_path(check: str, found: dict[str, str]) -> None:
    assert found[check] == ""
