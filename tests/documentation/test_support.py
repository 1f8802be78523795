"""The support page counts cases by the backend that ran them; tables have a cell per column."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from benchmarks import result_file

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))


@pytest.mark.parametrize(
    ("case", "counted"),
    [
        ("test_merge_states.py::test_values[triton-64]", {("merge_states", "triton")}),
        ("test_gated_delta_rule.py::test_values[64]", {("gated_delta_rule", "triton")}),
        ("test_gated_delta_rule.py::test_decoding_in_a_graph", set()),
        ("test_gated_delta_rule_update.py::test_in_a_graph", {("gated_delta_rule", "cuda")}),
    ],
)
def test_a_case_counts_for_the_backend_that_it_or_its_file_names(
    case: str, counted: set[tuple[str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "tests" / "gpu" / "results"
    folder.mkdir(parents=True)
    record = {
        "system": {"devices": [{"name": "GPU", "capability": [9, 0]}]},
        "binaries": [],
        "counts": {"passed": 1},
        "cases": [{"case": f"tests/gpu/{case}", "outcome": "passed"}],
    }
    result_file.write(folder / "made.json", record)
    (read,) = import_module("support").records(tmp_path)
    assert {(one.op, one.backend) for one in read.cases if one.backend} == counted


def test_a_gpu_that_a_wheel_is_also_for_runs_its_native_code(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "gpu" / "results"
    folder.mkdir(parents=True)
    record = {
        "system": {"devices": [{"name": "GB10", "capability": [12, 1]}]},
        "binaries": [],
        "counts": {"passed": 1},
        "cases": [{"case": "tests/gpu/test_attention.py::test_it[cuda]", "outcome": "passed"}],
    }
    result_file.write(folder / "made.json", record)
    table = import_module("support").ops_that_ran(tmp_path)
    assert "| `attention` | `sm_120` on GB10: 1 cases |" in table


def test_a_gpu_is_named_only_for_what_ran_on_it(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "gpu" / "results"
    folder.mkdir(parents=True)
    for name, backend, forced in (("P1", "cuda", "sm_80"), ("T1", "triton", None)):
        record = {
            "system": {"devices": [{"name": name, "capability": [9, 0]}]},
            "binaries": [],
            "counts": {"passed": 1},
            "forced_architecture": forced,
            "cases": [
                {"case": f"tests/gpu/test_attention.py::test_it[{backend}]", "outcome": "passed"}
            ],
        }
        result_file.write(folder / f"{name}.json", record)
    said = import_module("support").in_words(tmp_path)
    assert said.startswith("PTX was tested on an P1: `attention` for `sm80`; ")
    assert "flashvar's Triton kernels for `attention` have run on an T1; " in said


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["test_merge_states"], "only tests of `merge_states`"),
        (["test_attention_bias", "test_attention_cache"], "only tests of `attention`"),
        (["test_layers", "test_merge_states"], "only tests of `merge_states` and `test_layers.py`"),
    ],
)
def test_a_record_of_a_part_is_not_one_of_the_binary(
    files: list[str], said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tests" / "gpu" / "results"
    folder.mkdir(parents=True)
    system = {"devices": [{"name": "GPU", "capability": [9, 0]}]}
    software = dict.fromkeys(("driver_display", "torch", "triton", "python"), "1")
    case = {"case": "tests/gpu/test_merge_states.py::test_it[cuda]", "outcome": "passed"}
    record = {
        "system": {**system, **software},
        "binaries": [{"toolkit": {"version": "13"}, "source": {"revision": "0123456789"}}],
        "counts": {"passed": 1},
        "not_run": {"Skipped: no GPU": 1},
        "cases": [case],
        "chosen": [f"tests/gpu/{file}.py" for file in files],
    }
    result_file.write(folder / "made.json", record)
    support = import_module("support")
    assert support.records(tmp_path) == []
    assert support.skipped(tmp_path).splitlines()[2:] == []
    (row,) = support.versions(tmp_path).splitlines()[2:]
    assert row.startswith(f"| `made.json`, {said} | GPU | ")
    assert "| 0123456 |" in row


def test_architectures_that_never_ran_share_a_row() -> None:
    rows = import_module("support").what_was_run(ROOT).splitlines()[2:]
    never = [row for row in rows if row.endswith("| no | no |")]
    assert len(never) == 1
    assert "`sm_100`, " in never[0]
    assert sum(row.count("`sm_90`") for row in rows) == 1


def test_reasons_of_skipped_cases_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "gpu" / "results"
    folder.mkdir(parents=True)
    for name, found in (("a", {"Skipped: no GPU": 3}), ("b", {"Skipped: no GPU": 1, "left": 2})):
        result_file.write(folder / f"{name}.json", {"not_run": found})
    result_file.write(folder / "c.json", {"losses": [1.0]})
    rows = import_module("support").skipped(tmp_path).splitlines()[2:]
    assert rows == ["| no GPU | 1 to 3 | 2 of 2 |", "| left | 2 | 1 of 2 |"]


def test_what_support_says_of_the_records() -> None:
    """No case failed; cases of context_parallel without flashvar's kernels forced cuDNN."""
    folder = ROOT / import_module("support").RESULTS
    found = [result_file.read(path) for path in sorted(folder.glob("*.json"))]
    counts = [one["counts"] for one in found if "counts" in one]
    assert counts
    assert all("failed" not in one for one in counts)
    cases = [case for one in found if "ranks" in one for case in one["cases"]]
    active = [case for case in cases if case["mode"] != "plain"]
    assert active
    assert all(case["right"] for case in active)
    others = [case["case"] for case in active if case["forwards_of_flashvar"] == 0]
    assert all(name.endswith("CUDNN_ATTENTION") for name in others), others


def test_an_op_without_an_axis_leaves_its_cell_empty() -> None:
    lines = import_module("variants").kernels(ROOT).splitlines()
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert any(line.startswith("| `merge_states_fwd` |") and " | - | " in line for line in lines)
