"""A release in a fresh clone passes; one with a fault between build and publish is refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fake_release
import pytest
from checked_release import BINARY, PURE, SDIST, Fault, add, check, faults, flip
from checkout import git
from fake_release import RECORD, Case

from flashvar_factory.inspect import archive
from flashvar_factory.release import checks

pytestmark = pytest.mark.usefixtures("on_paper")


def test_a_release_in_a_fresh_clone(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    output = case.root / "build" / "checked"
    (output / checks.SBOMS).mkdir(parents=True)
    (output / checks.SBOMS / "earlier.cdx.json").touch()
    (output / checks.SBOMS / "not-ours.txt").touch()
    assert check(case) == 0, capsys.readouterr().err
    document = json.loads((output / checks.FILE).read_text(encoding="utf-8"))
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in case.one.iterdir()
    }
    assert document["files"] == hashes
    assert set(hashes) == set(case.names.values())
    assert document["tag"] == f"v{case.release}"
    assert document["revision"] == git(case.root, "rev-parse", "HEAD").strip()
    used = {"sm_80": [RECORD.as_posix()], "triton": [RECORD.as_posix()]}
    assert document["gpu_records"] == used
    notes = (output / checks.NOTES).read_text(encoding="utf-8")
    assert "* sm_80: 12 tests passed on NVIDIA A100, at commit " in notes
    assert "* Triton: 7 tests passed on NVIDIA A100, at commit " in notes
    assert f"(`{RECORD.as_posix()}`)" in notes
    assert "on no GPU" not in notes
    assert all(f"{digest}  {name}" in notes for name, digest in hashes.items())
    bill, other = sorted((output / checks.SBOMS).iterdir())
    assert other.name == "not-ours.txt"
    assert bill.name == "flashvar-sm80-x86_64.cdx.json"
    files = archive.read(case.one / case.names["binary"])
    assert bill.read_bytes() in files.values()
    assert git(case.root, "status", "--porcelain") == ""


def test_comments_may_differ_from_the_record(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    same_version(case)  # its hash is of other sources: see TREES
    changed("src/cuda/abi/info.cc", "// Said better.\n")(case)
    for name in ("CMakeLists.txt", "variants.toml"):
        changed(name, "# Said better.\n")(case)
    check(case)
    said = capsys.readouterr().err
    assert " changed after its commit" not in said
    assert "was made from sources" not in said


def flip_in_both(case: Case) -> None:
    with case.both("binary") as path:
        flip(path)


def remove(case: Case, name: str) -> None:
    for folder in (case.one, case.two):
        (folder / case.names[name]).unlink()


def rename(case: Case, name: str, old: str, new: str) -> None:
    for folder in (case.one, case.two):
        path = folder / case.names[name]
        path.rename(path.with_name(path.name.replace(old, new)))


def without_sbom(case: Case) -> None:
    with case.both("binary") as path:
        files = archive.read(path)
        fake_release.repack(path, {name: files[name] for name in files if "/sboms/" not in name})


def with_module(case: Case) -> None:
    with case.both("pure") as path:
        fake_release.repack(path, {**archive.read(path), "flashvar/more.py": b"import os\n"})


def of_another_commit(case: Case) -> None:
    before = git(case.root, "rev-parse", "HEAD~1").strip()
    case.put_binary(source=replace(fake_release.described(case.root).source, revision=before))


def of_a_dirty_tree(case: Case) -> None:
    case.put_binary(source=replace(fake_release.described(case.root).source, dirty=True))


def of_other_sources(case: Case) -> None:
    case.put_binary(source=replace(fake_release.described(case.root).source, hash="5" * 64))


def in_place_of(put: Callable[[Path], object], name: str) -> Fault:
    """Something of a file's name that is no file, in both builds."""

    def plant(case: Case) -> None:
        for folder in (case.one, case.two):
            path = folder / case.names[name]
            path.rename(folder.with_name(f"moved-{folder.name}"))
            put(path)

    return plant


def linked(path: Path) -> None:
    path.symlink_to(path.parent.with_name(f"moved-{path.parent.name}"))


def second_build_of_links(link: Callable[[Path, Path], None]) -> Fault:
    def plant(case: Case) -> None:
        for path in case.two.iterdir():
            path.unlink()
            link(case.one / path.name, path)

    return plant


# By the check that refuses it: what is planted, and words of the message.
FILES: dict[str, tuple[str, Fault, str]] = {
    "wheel is missing": ("files", lambda case: remove(case, BINARY), "found none"),
    "project's wheel is missing": ("files", lambda case: remove(case, PURE), "(wheel for any)"),
    "sdist is missing": ("files", lambda case: remove(case, SDIST), "(sdist)"),
    "wheel of another name": (
        "files",
        lambda case: add(case, f"flashvar_sm99-{case.release}-py3-none-any.whl"),
        "flashvar_sm99",
    ),
    "file that is no wheel": (
        "files",
        lambda case: add(case, "notes.txt"),
        "not a file of",
    ),
    "sdist of another kind": (
        "files",
        lambda case: rename(case, SDIST, ".tar.gz", ".zip"),
        "not a file of",
    ),
    "folder": ("files", lambda case: (case.one / "more").mkdir(), "not a file of"),
    "wheel of another platform": (
        "files",
        lambda case: rename(case, BINARY, "manylinux_2_28_x86_64", "linux_x86_64"),
        "not a file of",
    ),
    "wheel of another version": (
        "files",
        lambda case: rename(case, BINARY, case.release, "9.9"),
        "found 9.9",
    ),
    "extra of another version": (
        "files",
        lambda case: case.edit(
            PURE, "METADATA$", f"flashvar-sm80=={case.release}", "flashvar-sm80==9.9"
        ),
        "wants flashvar-sm80 9.9",
    ),
    "folder in place of a wheel": (
        "files",
        in_place_of(Path.mkdir, BINARY),
        "found a link, a fold",
    ),
    "folder in place of the sdist": (
        "files",
        in_place_of(Path.mkdir, SDIST),
        "found a link, a folder",
    ),
    "pipe in place of a wheel": ("files", in_place_of(os.mkfifo, BINARY), "found a link, a folder"),
    "link in place of a wheel": ("files", in_place_of(linked, BINARY), "found a link, a folder"),
    "second build that is links": (
        "second build",
        second_build_of_links(lambda old, new: new.symlink_to(old)),
        "of the first, linked",
    ),
    "second build that is hard links": (
        "second build",
        second_build_of_links(lambda old, new: new.hardlink_to(old)),
        "of the first, linked",
    ),
    "byte that one build alone has": (
        "second build",
        lambda case: flip(case.one / case.names[BINARY]),
        "found a difference in flashvar_sm80",
    ),
    "file that the second build lacks": (
        "second build",
        lambda case: (case.two / case.names[BINARY]).unlink(),
        "their names",
    ),
    "byte that both builds have": ("audit", flip_in_both, "found errors"),
    "extra that is missing": (
        "audit",
        lambda case: case.edit(PURE, "METADATA$", "Provides-Extra: sm80\n", ""),
        "found errors: 1",
    ),
    "dependency that nobody declared": (
        "audit",
        lambda case: case.edit(PURE, "METADATA$", "\nRequires-Dist: torch", "\nRequires-Dist: t"),
        "found errors: 1",
    ),
    "module that is in no sources": ("audit", with_module, "found errors: 1"),
    "module with other bytes": (
        "audit",
        lambda case: case.edit(PURE, r"^flashvar/errors\.py$", "class ", "class  "),
        "found errors: 1",
    ),
    "binary of another commit": ("audit", of_another_commit, "found errors"),
    "binary of a dirty tree": ("audit", of_a_dirty_tree, "found errors"),
    "binary of other sources": ("audit", of_other_sources, "found errors"),
    "binary that claims PTX": (
        "audit",
        lambda case: case.put_binary(code_kinds=("sass", "ptx")),
        "found errors",
    ),
    "SBOM of another library": (
        "audit",
        lambda case: case.edit(BINARY, r"\.cdx\.json$", '"content": "', '"content": "0'),
        "found errors",
    ),
    "no SBOM": ("SBOM", without_sbom, "found none; build it again"),
}


@pytest.mark.parametrize("fault", FILES)
def test_files_that_are_no_release(
    fault: str, case_files: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    name, plant, words = FILES[fault]
    plant(case_files)
    assert check(case_files) == 9
    refused(capsys.readouterr().err, name, words)
    assert not (case_files.root / "build" / "checked" / checks.FILE).exists()


def refused(error: str, name: str, words: str) -> None:
    """The check of this name failed, and its message has the words; " … " stands for any."""
    assert "publish nothing of it" in error
    found = faults(error).get(name, "")
    assert re.search(".*".join(map(re.escape, words.split(" … "))), found), error
    assert "Traceback" not in error


def moved_tag(case: Case) -> None:
    git(case.root, "tag", "--force", f"v{case.release}", "HEAD~1")


def no_tag(case: Case) -> None:
    git(case.root, "tag", "--delete", f"v{case.release}")


def dirty(case: Case) -> None:
    (case.root / "notes.txt").write_text("more", encoding="utf-8")


def replaced(name: str, old: str, new: str) -> Fault:
    """A file in which something else stands; `{version}` is the release's."""

    def plant(case: Case) -> None:
        path = case.root / name
        text = path.read_text(encoding="utf-8")
        old_here, new_here = (one.format(version=case.release) for one in (old, new))
        assert old_here in text
        path.write_text(text.replace(old_here, new_here), encoding="utf-8")
        case.commit()

    return plant


def changed(name: str, text: str) -> Fault:
    """Sources that are not those of the record."""

    def plant(case: Case) -> None:
        with (case.root / name).open("a", encoding="utf-8") as opened:
            opened.write(text)
        case.commit()

    return plant


def no_record(case: Case) -> None:
    (case.root / RECORD).unlink()
    case.commit()


def same_version(case: Case) -> None:
    case.record(version=case.release, code_kinds=["sass"])


def made_of(**changes: object) -> Fault:
    def plant(case: Case) -> None:
        before = git(case.root, "rev-parse", "HEAD~1").strip()
        source = {"revision": before, "dirty": False, "hash": "1" * 64}
        case.record(source={**source, **changes})

    return plant


def without_merge_states(case: Case) -> None:
    rows = json.loads((case.root / RECORD).read_text(encoding="utf-8"))["counts_by_file"]
    rows["test_merge_states.py triton"] = rows.pop("test_merge_states.py cuda")
    case.record(counts_by_file=rows)


def failures_twice(case: Case) -> None:
    """Readers that take the last of two keys see no failures."""
    text = (case.root / RECORD).read_text(encoding="utf-8")
    changed = text.replace('"counts": {', '"counts": {"failed": 9}, "counts": {')
    assert changed != text
    (case.root / RECORD).write_text(changed, encoding="utf-8")
    case.commit()


RENEWED = "nox -s build-dev -- arch=sm_80 ptx=1 hdim=all && nox -s gpu -- --results tests/gpu/"
TREES: dict[str, tuple[str, Fault, str]] = {
    "dirty tree": ("sources", dirty, "notes.txt"),
    "tag on another commit": ("tag", moved_tag, "git checkout v"),
    "no such tag": ("tag", no_tag, "found none; git fetch --tags"),
    "changelog without the version": (
        "changelog",
        replaced("CHANGELOG.md", "## {version} - 2026-01-31", "## Unreleased"),
        "found headings of Unreleased",
    ),
    "changelog without a date": (
        "changelog",
        replaced("CHANGELOG.md", "## {version} - 2026-01-31", "## {version}"),
        "expected a date",
    ),
    "no record": ("GPU records", no_record, "found none; renew it"),
    "CUDA changed since the record": (
        "GPU records",
        changed("src/cuda/abi/info.cc", "int changed;\n"),
        "src/cuda/abi/info.cc changed after its commit … ; renew it on an NVIDIA A100: " + RENEWED,
    ),
    "CMake changed since the record": (
        "GPU records",
        changed("CMakeLists.txt", "message(STATUS changed)\n"),
        "CMakeLists.txt changed after its commit … ; renew it",
    ),
    "variants.toml changed since the record": (
        "GPU records",
        replaced("variants.toml", 'ptx = "8.8"', 'ptx = "8.7"'),
        "variants.toml changed after its commit … ; renew it",
    ),
    "Triton changed since the record": (
        "GPU records",
        changed("src/python/flashvar/backends/triton/__init__.py", "changed = 1\n"),
        "Triton kernels: expected a record",
    ),
    "record of an unknown commit": (
        "GPU records",
        made_of(revision="c0ffee" * 6 + "c0ff"),
        "is not in this clone",
    ),
    "record of a dirty tree": ("GPU records", made_of(dirty=True), "was not built from a commit"),
    "record of an option": ("GPU records", made_of(revision="--all"), "is not in this clone"),
    "record of other sources": ("GPU records", same_version, "was made from sources 111111111111"),
    "record with failures": (
        "GPU records",
        lambda case: case.record(counts={"passed": 18, "failed": 1}),
        "1 of its tests failed",
    ),
    "record with failures that its sum hides": (
        "GPU records",
        lambda case: case.record(
            counts_by_file={"test_attention_features.py cuda": {"passed": 22, "failed": 3}}
        ),
        "3 of its tests failed",
    ),
    "record with tests that broke off": (
        "GPU records",
        lambda case: case.record(counts={"passed": 25, "skipped": 1, "crashed": 2}),
        "2 of its tests failed",
    ),
    "record that does not add up": (
        "GPU records",
        lambda case: case.record(counts={"passed": 4000, "skipped": 1}),
        "its counts differ from the sum over its files",
    ),
    "record of fewer tests than none": (
        "GPU records",
        lambda case: case.record(counts={"passed": 25, "skipped": 1, "failed": 3, "error": -3}),
        "found none; renew it",
    ),
    "record with a key twice": ("GPU records", failures_twice, "found none; renew it"),
    "record of a part of the tests": (
        "GPU records",
        lambda case: case.record(left_to_other_shards=7),
        "it did not run all tests",
    ),
    "record of a run that was terminated": (
        "GPU records",
        lambda case: case.record(ended_early=True),
        "it did not run all tests",
    ),
    "record of tests that were chosen": (
        "GPU records",
        lambda case: case.record(chosen=["-k", "test_forward"]),
        "it did not run all tests",
    ),
    "record without an op": (
        "GPU records",
        lambda case: case.record(counts_by_file={"test_attention_features.py cuda": {"passed": 9}}),
        "it ran no test of causal_conv1d, gated_delta_rule, merge_states",
    ),
    "record of an op by Triton alone": (
        "GPU records",
        without_merge_states,
        "it ran no test of merge_states",
    ),
    "record of another nvcc": (
        "GPU records",
        lambda case: case.record(toolkit={"compiler": "nvcc", "version": "12.9.86"}),
        "by nvcc 12.9.86, the release's by 13.0.88",
    ),
    "record of another architecture": (
        "GPU records",
        lambda case: case.record(forced_architecture="sm_90"),
        "the binary of sm_80: expected a record",
    ),
}


@pytest.mark.parametrize("fault", TREES)
def test_checkout_that_is_no_release(
    fault: str, case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not the checks of files, which take longest and of which the cases of FILES are.
    of_trees = ("sources", "tag", "changelog", "GPU records")
    monkeypatch.setattr(checks, "CHECKS", {one: checks.CHECKS[one] for one in of_trees})
    name, plant, words = TREES[fault]
    plant(case)
    assert check(case) == 9
    refused(capsys.readouterr().err, name, words)


@pytest.mark.parametrize("build", ["one", "two"])
def test_a_file_that_is_too_large(
    build: str, case_files: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    with (getattr(case_files, build) / case_files.names[BINARY]).open("wb") as opened:
        opened.truncate(1 << 34)
    assert check(case_files) == 9
    error = capsys.readouterr().err
    assert "expected at most 1,073,741,824 bytes, found 17,179,869,184" in error
    assert "publish nothing of it" in error


def test_notes_say_what_ran_nowhere(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "LAST", {})
    device = {"name": "NVIDIA H200", "capability": [9, 0]}
    system = {"devices": [device], "platform": "linux_x86_64", "interpreted": False}
    case.record(system=system, forced_architecture="sm_80")
    fake_release.put_own(case)
    assert check(case) == 0, capsys.readouterr().err
    notes = (case.root / "build" / "checked" / checks.NOTES).read_text(encoding="utf-8")
    assert "* sm_80: 12 tests passed on NVIDIA H200, whose driver translated its PTX" in notes
    assert "* the machine code of sm_80 for linux_x86_64: on no GPU yet" in notes


@pytest.mark.parametrize("tag", ["v9.9", "0.1.0", "v0.1.0.post1", "main"])
def test_tag_of_another_version(tag: str, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    git(case.root, "tag", "--force", tag)
    assert check(case, tag=tag) == 9
    error = capsys.readouterr().err
    assert set(faults(error)) == {"tag"}
    assert f"expected the tag v{case.release} of the version file, found {tag}" in error


@pytest.mark.parametrize("again", ["itself", "nothing"])
def test_without_a_second_build(
    again: str, case_files: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = case_files.one if again == "itself" else case_files.root / "nothing"
    assert check(case_files, again=folder) == 9
    error = capsys.readouterr().err
    assert set(faults(error)) == {"second build"}
    assert "expected the folder of a second build" in error


def test_wheels_that_do_not_work(
    case_files: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BREAK_THE_SMOKE_TEST", "1")
    assert check(case_files) == 9
    assert set(faults(capsys.readouterr().err)) == {"smoke"}
