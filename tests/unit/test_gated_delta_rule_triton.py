"""The Triton kernels of gated_delta_rule without a GPU: interpreted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreted_gated_delta_rule import CASES, Case
from interpreter import interpreted

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found(python: str) -> dict[str, str]:
    """Case -> what was wrong; all of them in one process, which takes a second to start."""
    script = Path(__file__).with_name("interpreted_gated_delta_rule.py")
    answers: dict[str, str] = json.loads(interpreted(python, "-W", "ignore", str(script)))
    return answers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""
