"""After a change of one op's sources, a record of that op's tests is enough for a release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_release
import pytest
from checked_release import check, faults
from checkout import git
from fake_release import RECORD, RECORDS, Case

from flashvar_factory.config import schema
from flashvar_factory.release import checks, gpu_records

pytestmark = pytest.mark.usefixtures("on_paper")

TESTS = "tests/gpu/test_merge_states.py"
PART = RECORDS / "fake-merge_states.json"
SOURCE = "src/cuda/merge_states/row.cuh"


def commit(case: Case, files: dict[str, str]) -> str:
    """Append to files, and commit them."""
    for name, text in files.items():
        (case.root / name).parent.mkdir(parents=True, exist_ok=True)
        with (case.root / name).open("a", encoding="utf-8") as opened:
            opened.write(text)
    git(case.root, "add", "--all")
    case.commit()
    return git(case.root, "rev-parse", "HEAD").strip()


def part_of(case: Case, revision: str) -> str:
    """A record of the tests of merge_states on a binary of a commit."""
    record: dict[str, Any] = json.loads((case.root / RECORD).read_text(encoding="utf-8"))
    record["binaries"][0]["source"]["revision"] = revision
    rows = {"test_merge_states.py cuda": {"passed": 3}}
    return json.dumps(
        {**record, "chosen": [TESTS], "counts": {"passed": 3}, "counts_by_file": rows}
    )


def test_a_record_of_the_op_that_changed(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    changed = commit(case, {SOURCE: "inline int changed;\n", TESTS: "# As new as it.\n"})
    assert check(case) == 9
    said = faults(capsys.readouterr().err)["GPU records"]
    assert "the binary of sm_80: expected a record" in said
    assert f"{SOURCE}, which only merge_states uses, changed after its commit" in said
    assert f"--results {PART.as_posix()} --backend cuda {TESTS}, then commit" in said
    commit(case, {PART.as_posix(): part_of(case, changed)})
    fake_release.put_own(case)
    code, printed = check(case), capsys.readouterr()
    assert code == 0, printed.err
    assert f"relies on {RECORD.as_posix()}, {PART.as_posix()}" in printed.out
    output = case.root / "build" / "checked"
    document = json.loads((output / checks.FILE).read_text(encoding="utf-8"))
    assert document["gpu_records"]["sm_80"] == [RECORD.as_posix(), PART.as_posix()]
    notes = (output / checks.NOTES).read_text(encoding="utf-8")
    words = f"* sm_80: 3 tests of {TESTS} passed on NVIDIA A100, at commit {changed[:12]}"
    assert words in notes
    # It is of no use once the op changed again, nor where all ops share what changed.
    for name in (SOURCE, "src/cuda/core/math.cuh"):
        commit(case, {name: "inline int changed_again;\n"})
        assert check(case) == 9
        assert f"{name} changed after its commit" in faults(capsys.readouterr().err)["GPU records"]


def test_a_change_of_what_another_op_includes(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '#include "merge_states/row.cuh"\n'
    changed = commit(case, {"src/cuda/attention/mask.cuh": line, SOURCE: "inline int x;\n"})
    commit(case, {PART.as_posix(): part_of(case, changed)})
    assert check(case) == 9
    said = faults(capsys.readouterr().err)["GPU records"]
    assert f"{SOURCE}, which only" not in said
    assert f"{RECORD.as_posix()}: {SOURCE} changed after its commit" in said


def test_the_sources_of_this_project_are_told_apart(case: Case) -> None:
    manifest = fake_release.described(case.root)
    sources = ("CMakeLists.txt", "cmake", "src/cuda", schema.FILE_NAME)
    need = gpu_records.RecordNeed("sm_80", sources, (manifest,))
    owners = gpu_records.owners(case.root, need)
    assert set(owners.values()) == {*need.ops}
    assert len(need.ops) > 3
    listed = git(case.root, "ls-tree", "-r", "--name-only", "HEAD", "src/cuda").splitlines()
    others = {Path(name).parts[2] for name in listed if name not in owners}
    assert others == {"CMakeLists.txt", "abi", "core", "ptx", "sm80", "sm90"}
