"""What the runner of the benchmarks says to words that do not fit, before it measures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/run.py", *words]
    environment = {**os.environ, "PYTHONPATH": "src/python", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a benchmark, or --compare"),
        (["import", "--compare", "a", "b"], "and not both"),
        (["--compare", "a", "b", "--json", "c"], "--json does not go with --compare"),
        (["--compare", "a", "b", "--threshold", "-1"], "expected a number above 0, found -1"),
        (
            ["import", "--seconds", "9"],
            "--seconds goes with attention, models, random, shapes, ops, layers, integrations",
        ),
        (
            ["host", "--contender", "flex"],
            "--contender goes with attention, models, random, shapes, ops, layers, not",
        ),
        (["size", "--threshold", "1"], "--threshold goes with --compare, not with size"),
        (["attention", "--seconds", "0"], "expected a number above 0, found 0"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_words_that_do_not_fit_are_refused(words: list[str], said: str) -> None:
    done = bench(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_nothing_is_measured_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = bench("import", "--json", str(tmp_path / "file" / "result.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json: expected a file that can be written" in done.stderr


def test_a_failed_run_leaves_the_old_result(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("{}", encoding="utf-8")
    for target in (old, new):
        assert bench("import", "--only", "nope", "--json", str(target)).returncode == 2
    assert old.read_text(encoding="utf-8") == "{}"
    assert not new.exists()


def test_a_second_signal_does_not_end_the_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    path = list(sys.path)
    run = import_module("benchmarks.run")
    sys.path[:] = path  # which the runner changes, for it is a program
    later: dict[int, object] = {}
    monkeypatch.setattr(signal, "signal", later.__setitem__)
    with pytest.raises(KeyboardInterrupt):
        run._interrupt(signal.SIGTERM, None)
    assert later == {signal.SIGTERM: signal.SIG_IGN}


def test_an_interrupted_run_leaves_the_old_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    path = list(sys.path)
    run, report = import_module("benchmarks.run"), import_module("benchmarks.report")
    sys.path[:] = path  # which the runner changes, for it is a program
    lost = {"case": "b", "contender": "c", "skipped": report.INTERRUPTED}
    rows = [{"case": "a", "contender": "c"}, lost]
    made = report.Report(rows=rows, columns=("case",), lines=[("a",)])
    monkeypatch.setattr(import_module("benchmarks.size"), "run", lambda options: made)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    target = tmp_path / "result.json"
    target.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["run.py", "size", "--json", str(target)])
    assert run.main() == 130
    assert target.read_text(encoding="utf-8") == "{}"
    kept = import_module("benchmarks.result_file").read(tmp_path / "result.partial.json")
    assert kept["rows"] == rows
