"""The Triton kernels of causal_conv1d without a GPU: interpreted, and compiled."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from interpreted_causal_conv1d import CASES, UPDATES, Case
from interpreter import SOURCES, interpreted

pytest.importorskip("triton", reason="triton is not installed")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(python: str) -> dict[str, str]:
    """Case -> what was wrong; all of them in one process, which takes a second to start."""
    answers: dict[str, str] = json.loads(
        interpreted(python, "-W", "ignore", str(HERE / "interpreted_causal_conv1d.py"))
    )
    return answers


@pytest.mark.parametrize("case", CASES + UPDATES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""


# Nothing in the kernels depends on the capability: each call is compiled for one.
COMPILED = {"80": ("btd packed", "bdt batch"), "90": ("btd batch", "bdt packed")}


@pytest.fixture(scope="module")
def compiled(python: str) -> dict[str, dict[str, dict[str, int]]]:
    """Call -> kernel -> its moves, as PTX names them, compiled in a process for each capability."""
    answers: dict[str, dict[str, dict[str, int]]] = {}
    for capability, calls in COMPILED.items():
        finished = subprocess.run(
            [python, str(HERE / "compiled_causal_conv1d.py"), capability, *calls],
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        answers.update(json.loads(finished.stdout))
    return answers


@pytest.mark.parametrize("packed", ["batch", "packed"])
@pytest.mark.parametrize("layout", ["btd", "bdt"])
def test_compiled(layout: str, packed: str, compiled: dict[str, dict[str, dict[str, int]]]) -> None:
    kernels = compiled[f"{layout} {packed}"]
    expected = {"fwd_kernel", "final_kernel", "bwd_kernel"}
    if packed == "packed":
        expected |= {"bwd_state_kernel", "update_kernel"}
    assert set(kernels) == expected
    if layout == "btd":  # each tap moves 16 bytes at a time
        assert kernels["fwd_kernel"]["ld.global.v4.b32"] >= 4
        for kernel in ("fwd_kernel", "bwd_kernel"):
            assert kernels[kernel]["st.global.v4.b32"] >= 1
            assert not any(name.endswith("b16") for name in kernels[kernel])
