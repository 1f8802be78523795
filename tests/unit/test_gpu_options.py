"""A GPU test run that was promised a device fails without one; a rehearsal and shards need none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import result_file

ROOT = Path(__file__).parents[2]
NO_DEVICE = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def run(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *words], cwd=ROOT, env=NO_DEVICE, capture_output=True, text=True)


def test_required_device_that_is_not_there_is_an_error(python: str) -> None:
    file = "tests/gpu/test_attention_runtime.py"
    done = run(python, "-m", "pytest", file, "--require-device")
    assert done.returncode == 4  # pytest's own, of a usage error
    assert "--require-device: torch sees no CUDA device" in done.stderr


def test_a_rehearsal_runs_on_the_cpu(python: str) -> None:
    words = ("-m", "pytest", "tests/gpu/test_attention_features.py", "-q", "-p", "no:cacheprovider")
    done = run(python, *words, "--rehearse", "-k", "reference-packed-extras-d16")
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_shards_together_are_the_whole(tmp_path: Path, python: str) -> None:
    target = tmp_path / "all.json"
    words = ("-j", "2", "--seed", "5", "--results", str(target))
    # Of one file: what other files import takes seconds.
    others = ("--ignore-glob=*/test_[!a]*", "--ignore-glob=*/test_attention_[!f]*")
    chosen = (*others, "-k", "test_forward and d40")
    done = run(python, "tests/gpu/shards.py", *words, "--", *chosen)
    assert done.returncode == 0, done.stdout
    document = result_file.read(target)
    cases = [case["case"] for case in document["cases"]]
    assert len(cases) == len(set(cases))
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    from features import FEATURES

    assert len(cases) == len(FEATURES) * 2 * 2  # dtypes and backends
    assert document["counts"] == {"skipped": len(cases)}
    assert list(document["not_run"].values()) == [len(cases)]
    assert document["seed"] == 5
    assert any(one.startswith("-k test_forward") for one in document["chosen"])
