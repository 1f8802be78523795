"""What a run leaves behind is read as it was written, and stands in lines that can be diffed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import result_file

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks" / "results", ROOT / "tests" / "gpu" / "results")
# An example writes those of the losses by itself.
RECORDS = sorted(
    path for folder in RESULTS for path in folder.glob("*.json") if "train-gpt" not in path.name
)
ROWS: list[dict[str, Any]] = [
    {"cell": "a, b", "tflops": 0.1 + 0.2, "rounds": 25, "causal": True},
    {"cell": 'a "c"', "skipped": "not [here]"},
    {"cell": "µ", "rounds": 0, "tflops": 0.0, "causal": False, "skipped": ""},
]
DOCUMENT: dict[str, Any] = {
    "benchmark": "attention",
    "parameters": {"only": [], "seconds": 0.25},
    "environment": {"nvcc": None, "binaries": [{"hash": 64 * "0", "code_kinds": ["sass", "ptx"]}]},
}


@pytest.mark.parametrize("table", ["rows", "cases"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[1:2], []], ids=["several", "one", "none"])
def test_what_is_written_is_read(rows: list[dict[str, Any]], table: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    result_file.write(file, {**DOCUMENT, table: rows, "last": [1, 2]})
    assert result_file.read(file) == {**DOCUMENT, table: rows, "last": [1, 2]}


def test_a_row_is_a_line_and_columns_are_named_once(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    result_file.write(old, {**DOCUMENT, "rows": ROWS})
    result_file.write(new, {**DOCUMENT, "rows": [{**ROWS[0], "rounds": 26}, *ROWS[1:]]})
    lines, changed = (file.read_text(encoding="utf-8").splitlines() for file in (old, new))
    assert sum(a != b for a, b in zip(lines, changed, strict=True)) == 1
    assert sum('"tflops"' in line for line in lines) == 1


def test_what_is_none_in_a_row_is_absent(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    result_file.write(file, {"rows": [{"case": "a", "reason": None, "seconds": 1}]})
    assert result_file.read(file) == {"rows": [{"case": "a", "seconds": 1}]}


def test_what_is_no_object_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="expected an object, found list"):
        result_file.read(file)


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_records_are_as_they_were_written(record: Path, tmp_path: Path) -> None:
    result_file.write(tmp_path / "again.json", result_file.read(record))
    assert (tmp_path / "again.json").read_bytes() == record.read_bytes()
