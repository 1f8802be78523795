"""Two files of a benchmark side by side: ratios, what got worse, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import result_file

ROOT = Path(__file__).parents[2]


def compare(
    folder: Path, before: dict[str, object], after: dict[str, object], *words: str
) -> subprocess.CompletedProcess[str]:
    files = [folder / "a.json", folder / "b.json"]
    for file, document in zip(files, (before, after), strict=True):
        result_file.write(file, document)
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), "--compare", *map(str, files)]
    return subprocess.run([*command, *words], capture_output=True, text=True)


def rates(**tflops: float) -> dict[str, object]:
    rows: list[dict[str, object]] = [
        {"cell": cell, "contender": "flashvar-cuda", "tflops": rate, "median_ms": 1.0}
        for cell, rate in tflops.items()
    ]
    rows.append({"cell": "a", "contender": "flex", "skipped": "not here"})
    return {"schema": 2, "benchmark": "attention", "rows": rows}


def times(**milliseconds: float) -> dict[str, object]:
    rows = [{"statement": name, "median_ms": time} for name, time in milliseconds.items()]
    return {"schema": 2, "benchmark": "import", "rows": rows}


def test_more_is_better_for_rates(tmp_path: Path) -> None:
    done = compare(tmp_path, rates(a=100.0, b=100.0, c=1.0), rates(a=80.0, b=125.0))
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split() == [
        "a",
        "flashvar-cuda",
        "100",
        "TFLOP/s",
        "80",
        "TFLOP/s",
        "0.800",
        "WORSE",
    ]
    assert lines[2].split()[-1] == "1.250"
    assert lines[3].split()[-1] == "-"
    assert "mean 1.000 of 2" in lines[-1]
    assert "one file only: 1" in lines[-1]


def test_less_is_better_for_times(tmp_path: Path) -> None:
    done = compare(tmp_path, times(a=10.0), times(a=8.0))
    assert done.returncode == 0
    assert "1.250" in done.stdout
    assert "WORSE" not in done.stdout


@pytest.mark.parametrize(("threshold", "code"), [("0.3", 0), ("0.1", 1)])
def test_the_threshold_decides(threshold: str, code: int, tmp_path: Path) -> None:
    done = compare(tmp_path, rates(a=100.0), rates(a=80.0), "--threshold", threshold)
    assert done.returncode == code


def test_ways_are_told_apart(tmp_path: Path) -> None:
    rows = [{"way": way, "median_us": 1.0} for way in ("direct", "sdpa")]
    document = {"schema": 2, "benchmark": "integrations", "rows": rows}
    assert "mean 1.000 of 2" in compare(tmp_path, document, document).stdout


def test_another_machine_is_named(tmp_path: Path) -> None:
    first, second = (
        {**rates(a=1.0), "environment": {"device": {"name": name, "driver": "580"}}}
        for name in ("a card", "another card")
    )
    lines = compare(tmp_path, first, second).stdout.splitlines()
    assert lines[-1] == "not the same GPU: a card in A, another card in B"
    assert "not the same" not in compare(tmp_path, first, first).stdout


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (times(a=1.0), "files of 'attention'"),
        ({"rows": []}, "expected schema 2"),
    ],
    ids=["another benchmark", "another schema"],
)
def test_files_that_do_not_compare(after: dict[str, object], words: str, tmp_path: Path) -> None:
    done = compare(tmp_path, rates(a=1.0), after)
    assert done.returncode == 2
    assert words in done.stderr
