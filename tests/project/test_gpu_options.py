"""A GPU test run that was promised a device fails without one; a rehearsal and shards need none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from benchmarks import result_file

ROOT = Path(__file__).parents[2]
# Plugins of pytest take longer to load than most of these runs.
NO_DEVICE = {
    **os.environ,
    "CUDA_VISIBLE_DEVICES": "",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}


def run(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *words], cwd=ROOT, env=NO_DEVICE, capture_output=True, text=True)


# shards.py, with its processes started by the Python that started it: torch is loaded there.
SHARDS = """
import runpy, sys
sys.executable, *sys.argv = sys.argv[1:]
sys.path.insert(0, "tests/gpu")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_shards(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    return run(python, "-c", SHARDS, python, "tests/gpu/shards.py", *words)


def test_required_device_that_is_not_there_is_an_error(python: str) -> None:
    file = "tests/gpu/test_attention_runtime.py"
    done = run(python, "-m", "pytest", file, "--require-device")
    assert done.returncode == 4  # pytest's own, of a usage error
    assert "--require-device: torch sees no CUDA device" in done.stderr


def test_a_rehearsal_runs_on_the_cpu(tmp_path: Path, python_with_models: str) -> None:
    """With torch's compiler loaded, which torch.use_deterministic_algorithms() loads otherwise."""
    target = tmp_path / "record.json"
    words = ("-m", "pytest", "tests/gpu/test_attention_features.py", "-q", "-p", "no:cacheprovider")
    chosen = ("-k", "reference-packed-extras-d16", f"--results={target}")
    done = run(python_with_models, *words, "--rehearse", *chosen)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    # Two records can be diffed: most cases have no time, the others whole seconds.
    seconds = [case.get("seconds", 1) for case in result_file.read(target)["cases"]]
    assert len(seconds) == 4
    assert all(isinstance(one, int) and one >= 1 for one in seconds)


# Of one small file: what other files import and have takes seconds.
FILE = "tests/gpu/test_attention_varlen.py"
CASES = "sequences and no_length"
CHOSEN = ("--", "-k", CASES, "tests/gpu/../gpu/test_attention_varlen.py")

# A plugin that terminates the run after its third test.
TERMINATED = """
import os, signal

ended = []


def pytest_runtest_logfinish(nodeid):
    ended.append(nodeid)
    if len(ended) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_run_that_is_terminated_has_a_record_that_says_so(tmp_path: Path, python: str) -> None:
    (tmp_path / "terminated.py").write_text(TERMINATED, encoding="utf-8")
    target = tmp_path / "record.json"
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pytest; "
    words = ("-q", "-p", "terminated", "-p", "no:cacheprovider", f"--results={target}")
    done = run(python, "-c", f"{path}sys.exit(pytest.main({[FILE, *words]!r}))")
    assert done.returncode == 2, done.stdout  # pytest's own, of Ctrl-C
    document = result_file.read(target)
    assert document["ended_early"] is True
    assert len(document["cases"]) == 3


@pytest.fixture(scope="module")
def recorded(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of two shards together."""
    target = tmp_path_factory.mktemp("recorded") / "all.json"
    done = run_shards(python, "-j", "2", "--seed", "5", "--results", str(target), *CHOSEN)
    assert done.returncode == 0, done.stdout
    return result_file.read(target)


def test_shards_together_are_the_whole(recorded: dict[str, Any]) -> None:
    cases = [case["case"] for case in recorded["cases"]]
    assert len(cases) == len(set(cases))
    assert len(cases) == 3 * 4 * 2  # sides, places and backends
    assert recorded["counts"] == {"skipped": len(cases)}
    assert list(recorded["not_run"].values()) == [len(cases)]
    assert recorded["seed"] == 5
    assert recorded["ended_early"] is False
    assert recorded["chosen"] == [f"-k {CASES}", FILE]


def test_files_that_failed_run_again(recorded: dict[str, Any], tmp_path: Path, python: str) -> None:
    target = tmp_path / "all.json"
    words = ("-j", "1", "--results", str(target), "--again", *CHOSEN)
    failed = {"case": f"{FILE}::test_mended", "outcome": "failed", "reason": "AssertionError"}
    kept = {"case": "tests/gpu/test_rotary.py::test_kept", "outcome": "passed"}
    elsewhere = {**recorded["system"], "visible_devices": "7", "triton_cache": "/elsewhere"}
    before = {**recorded, "system": elsewhere, "seed": 7, "cases": [failed, kept]}
    result_file.write(target, before)
    assert run_shards(python, *words).returncode == 0
    document = result_file.read(target)
    assert document["cases"] == [*recorded["cases"], kept]
    assert document["counts"] == {**recorded["counts"], "passed": 1}
    assert document["seed"] == 7
    history = {"files": [FILE], "had_failed": [f"{FILE}::test_mended: AssertionError"]}
    assert document["ran_again"] == [history]
    done = run_shards(python, *words)
    assert done.returncode == 2
    assert f"no case of {target} failed" in done.stderr
    # What ran with other binaries replaces nothing.
    other = {**document, "binaries": [{"architecture": "sm_80"}], "cases": [failed]}
    result_file.write(target, other)
    done = run_shards(python, *words)
    assert done.returncode == 1
    assert "binaries: expected [{'architecture': 'sm_80'}]" in done.stdout
    assert result_file.read(target)["cases"] == [failed]


def test_the_rest_of_a_run_that_was_interrupted(
    recorded: dict[str, Any], tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "terminated.py").write_text(TERMINATED, encoding="utf-8")
    target, partial = tmp_path / "all.json", tmp_path / "all.partial.json"
    words = ("-j", "2", "--results", str(target))
    with monkeypatch.context() as patch:
        patch.setitem(NO_DEVICE, "PYTHONPATH", str(tmp_path))
        patch.setitem(NO_DEVICE, "PYTEST_ADDOPTS", "-p terminated")
        done = run_shards(python, *words, "--seed", "5", *CHOSEN)
    assert done.returncode == 1
    assert f"what has run is in {partial}" in done.stdout
    assert not target.exists()
    before = result_file.read(partial)
    assert before["ended_early"] is True
    assert 3 <= len(before["cases"]) < len(recorded["cases"])
    # Other tests are not its rest.
    other = ("--", "-k", "bad_arguments", CHOSEN[-1])
    done = run_shards(python, *words, "--rest", *other)
    assert done.returncode == 1
    assert f"chosen: expected ['-k {CASES}'" in done.stdout
    assert not target.exists()
    done = run_shards(python, *words, "--rest", *CHOSEN)
    assert done.returncode == 0, done.stdout
    assert not partial.exists()
    document = result_file.read(target)
    assert document["runs"] == 2
    for name in ("cases", "counts", "seed", "chosen", "ended_early"):
        assert document[name] == recorded[name], name
    done = run_shards(python, *words, "--rest", *CHOSEN)
    assert done.returncode == 2
    assert f"--rest: expected the record {partial}, found none" in done.stderr


class Device(NamedTuple):
    """A device of a name."""

    name: str
    memory: int = 80


class System(NamedTuple):
    """What `gather` says of devices."""

    devices: tuple[Any, ...]


@pytest.mark.parametrize(
    ("names", "visible", "count", "expected"),
    [
        ("A", None, 1, [{}]),
        ("AA", None, 2, ["0,1", "1,0"]),
        ("AAAB", None, 3, ["0,1,2", "1,2,0", "2,0,1"]),
        ("AA", "3,5", 2, ["3,5", "5,3"]),
        ("AB", None, 2, None),
        ("AA", None, 3, None),
        ("AA", None, 0, None),
        ("AA", None, -1, None),
    ],
)
def test_devices_of_the_processes(
    names: str, visible: str | None, count: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    shards = import_module("shards")
    found = System(tuple(Device(name) for name in names))
    monkeypatch.setattr("flashvar.machine.system.gather", lambda: found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if expected is None:
        with pytest.raises(SystemExit, match=f"--devices: expected {count} equal devices, found"):
            shards._devices(count)
        return
    words = [one if one == {} else {"CUDA_VISIBLE_DEVICES": one} for one in expected]
    assert shards._devices(count) == words


def test_shards_of_different_systems_are_not_merged(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    from record import merge

    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    for part, torch in zip(parts, ("2.10", "2.11"), strict=True):
        system = {"torch": torch, "visible_devices": part.stem}
        document = {"binaries": [], "system": system, "forced_architecture": None}
        result_file.write(part, {**document, "cases": [], "ended_early": False})
    with pytest.raises(ValueError, match=r"system: expected .*2\.10.*, found .*2\.11"):
        merge(parts)


def test_shares_take_equally_long() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    from shares import shares

    seconds = {"a": 100.0, "b": 60.0, "c": 30.0, "d1": 5.0, "d2": 4.0}
    groups = {"first": ["a"], "second": ["b"], "third": ["c"], "fourth": ["d1", "d2"]}
    assert shares(groups, seconds, 2) == {"first": 0, "second": 1, "third": 1, "fourth": 1}
    assert set(shares({str(i): ["unknown"] for i in range(9)}, {}, 3).values()) == {0, 1, 2}


def test_a_recorded_case_without_seconds_was_quick(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    from shares import seconds_before

    cases = [{"case": "quick"}, {"case": "slow", "seconds": 4}]
    result_file.write(tmp_path / "record.json", {"cases": cases})
    result_file.write(tmp_path / "other.json", {"losses": []})
    seconds = seconds_before(tmp_path)
    assert seconds.keys() == {"quick", "slow"}
    assert seconds["quick"] < 0.5 < seconds["slow"] == 4


def test_large_tests_are_the_last_part(python: str) -> None:
    file = "tests/gpu/test_attention_sizes.py"
    others, large = (_collected(python, f"--shard={part}/2", file) for part in (1, 2))
    assert others == []
    assert large == _collected(python, file) != []


def test_a_file_of_one_backends_kernels_asks_no_other(python: str) -> None:
    file = "tests/gpu/test_attention_splits.py"
    found = _collected(python, file)
    assert found == _collected(python, file, "--backend=cuda") != []
    assert not [case for case in found if "triton" in case]


def test_files_are_a_choice_of_the_folder_that_is_named_before_them(python: str) -> None:
    file = "tests/gpu/test_merge_states.py"
    found = _collected(python, "tests/gpu", file)
    assert found == _collected(python, file) != []


def _collected(python: str, *words: str) -> list[str]:
    command = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words)
    return [line for line in run(python, *command).stdout.splitlines() if "::" in line]
