"""The Triton kernel's arithmetic, without a GPU: Triton's interpreter against the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted_attention import CALLS, CASES, Case

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Case -> what was wrong; all of them in one process, which takes seconds to start."""
    folder = Path(__file__).parent
    sources = folder.parents[1] / "src" / "python"
    finished = subprocess.run(
        [sys.executable, str(folder / "interpreted_attention.py")],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (sources, folder.parent))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    answers: dict[str, str] = json.loads(finished.stdout)
    return answers


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_the_public_function(call: str, found: dict[str, str]) -> None:
    assert found[call] == ""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""
