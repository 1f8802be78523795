"""The Triton kernel's arithmetic, without a GPU: Triton's interpreter against the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted_attention import CASES, Case

pytest.importorskip("triton", reason="triton is not installed")


# The public function, as users debug it.
NAMED = """
import torch, flashvar
q, k, v = (torch.randn(1, 40, 2, 64, dtype=torch.half) for _ in range(3))
out = flashvar.attention(q, k, v, causal=True, backend="triton")
expected = flashvar.attention(q, k, v, causal=True, backend="reference")
torch.testing.assert_close(out, expected, atol=5e-3, rtol=5e-3)
"""

# Whole blocks of keys, the first ones too, whose every score is -inf.
HIDDEN_BY_VALUE = """
import torch, flashvar
q, k, v = (torch.rand(1, 200, 1, 16, dtype=torch.half) + 0.5 for _ in range(3))
k[:, :140] = 0.0
k[:, :140, :, 0] = -torch.inf
out, lse = flashvar.attention(q, k, v, backend="triton", return_lse=True)
expected = flashvar.attention(q, k[:, 140:], v[:, 140:], backend="reference", return_lse=True)
torch.testing.assert_close((out, lse), expected, atol=5e-3, rtol=5e-3)
"""


def interpreted(*arguments: str) -> str:
    """What a Python with Triton's interpreter prints."""
    folder = Path(__file__).parent
    sources = folder.parents[1] / "src" / "python"
    finished = subprocess.run(
        [sys.executable, *arguments],
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
    return finished.stdout


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Case -> what was wrong; all of them in one process, which takes a second to start."""
    script = Path(__file__).parent / "interpreted_attention.py"
    answers: dict[str, str] = json.loads(interpreted(str(script)))
    return answers


def test_named_backend_serves_cpu_tensors() -> None:
    interpreted("-c", NAMED)


def test_keys_at_minus_infinity_weigh_nothing() -> None:
    interpreted("-c", HIDDEN_BY_VALUE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""
