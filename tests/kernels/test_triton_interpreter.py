"""The Triton kernel's arithmetic, without a GPU: Triton's interpreter against the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreted_attention import CALLS, CASES, Case, takes_split_kv
from interpreter import interpreted

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found(python: str) -> dict[str, str]:
    """Case -> what was wrong; all of them in one process."""
    script = Path(__file__).with_name("interpreted_attention.py")
    answers: dict[str, str] = json.loads(interpreted(python, str(script)))
    return answers


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_the_public_function(call: str, found: dict[str, str]) -> None:
    assert found[call] == ""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", [*filter(takes_split_kv, CASES)], ids=str)
def test_few_queries(case: Case, splits: int, found: dict[str, str]) -> None:
    assert found[f"{splits} splits {case}"] == ""
