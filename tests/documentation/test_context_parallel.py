"""The pages say of torch's context_parallel what its records say."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from benchmarks import result_file

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))


def case(mode: str, right: bool, forwards: int) -> dict[str, Any]:
    return {"mode": mode, "right": right, "forwards_of_flashvar": forwards}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "tests" / "gpu" / "results"
    folder.mkdir(parents=True)
    times = [("flashvar", "allgather", 5.04), ("cuDNN", "allgather", 6.0), ("cuDNN", "alltoall", 7)]
    names = ("attention", "rotation", "milliseconds")
    record = {
        "ranks": 2,
        "environment": {
            "time": "2026-01-02T03:04:05",
            "device": {"name": "NVIDIA H100 80GB HBM3"},
            "source": {"revision": "0123456789abcdef", "dirty": False},
        },
        "forward_and_backward": {
            "problem": "9 tokens",
            "times": [dict(zip(names, one, strict=True)) for one in times],
        },
        "cases": [
            case("plain", False, 0),
            case("before", True, 2),
            case("inside", True, 0),
            case("inside", False, 2),
        ],
    }
    result_file.write(folder / "made.json", record)
    result_file.write(folder / "other.json", {"losses": [1.0]})
    return tmp_path


def test_a_wrong_case_and_one_of_torchs_kernels_are_not_counted_for_flashvar(root: Path) -> None:
    (row,) = import_module("context_parallel").what_ran(root).splitlines()[2:]
    assert row == (
        "| 2 H100 | 2 of 3 | 1 | 2026-01-02, commit 0123456789 (`tests/gpu/results/made.json`) |"
    )


def test_a_time_that_was_not_measured_is_a_hyphen(root: Path) -> None:
    said = import_module("context_parallel").times(root)
    assert said.startswith(
        "Milliseconds, medians: 9 tokens. 2 H100: 2026-01-02, commit 0123456789 "
    )
    assert said.splitlines()[-2:] == [
        "| 2 H100 | `allgather` | 5.0 | 6.0 |",
        "| 2 H100 | `alltoall` | - | 7.0 |",
    ]
