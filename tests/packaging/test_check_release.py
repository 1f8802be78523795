"""A release in a fresh clone is proved; one with a fault between build and publish is refused.

The file is long because it is a table, with one row per fault.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import release_set
from checkout import git
from release_set import RECORD, STEM, Case

from flashvar_factory import index
from flashvar_factory.audit import platform_tag
from flashvar_factory.cli import main
from flashvar_factory.index import serve
from flashvar_factory.inspect import archive
from flashvar_factory.release import proof, smoke

Fault = Callable[[Case], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return release_set.make(tmp_path_factory.mktemp("release"))


@pytest.fixture(autouse=True)
def on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library needs nothing that auditwheel could name; one installer, and no real torch."""
    policy = platform_tag.Policy("manylinux_2_17_x86_64", ())
    monkeypatch.setattr(platform_tag, "ask", lambda wheel, name, brought: policy)
    monkeypatch.setattr(smoke, "INSTALLERS", ("pip",))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.fixture
def case(made: Case, tmp_path: Path) -> Case:
    return release_set.clone(made, tmp_path)


def check(case: Case, *words: str, tag: str | None = None, again: Path | None = None) -> int:
    given = ["check-release", str(case.one), "--again", str(again or case.two)]
    given += ["--tag", tag or f"v{case.release}", "--python", sys.executable, *words]
    return main(["--root", str(case.root), *given])


def test_a_release_in_a_fresh_clone(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(case) == 0, capsys.readouterr().err
    output = case.root / "build" / "proof"
    document = json.loads((output / proof.FILE).read_text(encoding="utf-8"))
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in case.one.iterdir()
    }
    assert document["files"] == hashes
    assert set(hashes) == set(case.names.values())
    assert document["tag"] == f"v{case.release}"
    assert document["revision"] == git(case.root, "rev-parse", "HEAD").strip()
    used = {"sm_80": [RECORD.as_posix()], "triton": [RECORD.as_posix()]}
    assert document["gpu_records"] == used
    notes = (output / proof.NOTES).read_text(encoding="utf-8")
    assert "* sm_80: 12 tests passed on NVIDIA A100, at commit " in notes
    assert "* Triton: 7 tests passed on NVIDIA A100, at commit " in notes
    assert f"(`{RECORD.as_posix()}`)" in notes
    assert "on no GPU" not in notes
    assert all(f"{digest}  {name}" in notes for name, digest in hashes.items())
    (bill,) = (output / proof.SBOMS).iterdir()
    assert bill.name == "flashvar-sm80-x86_64.cdx.json"
    files = archive.read(case.one / case.names["binary"])
    assert bill.read_bytes() in files.values()
    assert git(case.root, "status", "--porcelain") == ""


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_in_both(case: Case) -> None:
    with case.both("binary") as path:
        flip(path)


def remove(case: Case, name: str) -> None:
    for folder in (case.one, case.two):
        (folder / case.names[name]).unlink()


def add(case: Case, name: str, content: bytes = b"") -> None:
    for folder in (case.one, case.two):
        (folder / name).write_bytes(content)


def rename(case: Case, name: str, old: str, new: str) -> None:
    for folder in (case.one, case.two):
        path = folder / case.names[name]
        path.rename(path.with_name(path.name.replace(old, new)))


def without_sbom(case: Case) -> None:
    with case.both("binary") as path:
        files = archive.read(path)
        release_set.repack(path, {name: files[name] for name in files if "/sboms/" not in name})


def with_module(case: Case) -> None:
    with case.both("pure") as path:
        release_set.repack(path, {**archive.read(path), "flashvar/more.py": b"import os\n"})


def of_another_commit(case: Case) -> None:
    before = git(case.root, "rev-parse", "HEAD~1").strip()
    case.put_binary(source=replace(release_set.described(case.root).source, revision=before))


def of_a_dirty_tree(case: Case) -> None:
    case.put_binary(source=replace(release_set.described(case.root).source, dirty=True))


def of_other_sources(case: Case) -> None:
    case.put_binary(source=replace(release_set.described(case.root).source, hash="5" * 64))


SDIST, PURE, BINARY = "sdist", "pure", "binary"
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


def faults(error: str) -> dict[str, str]:
    """The message of each check that failed."""
    found: dict[str, str] = {}
    name = ""
    for line in error.splitlines()[1:]:
        before, colon, behind = line.partition(": ")
        if colon and before in {**proof.CHECKS, **proof.LAST}:
            name = before
            found[name] = behind
        else:
            found[name] += f"\n{line}"
    return found


@pytest.mark.parametrize("fault", FILES)
def test_files_that_are_no_release(
    fault: str, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    name, plant, words = FILES[fault]
    plant(case)
    assert check(case) == 9
    refused(capsys.readouterr().err, name, words)
    assert not (case.root / "build" / "proof" / proof.FILE).exists()


def refused(error: str, name: str, words: str) -> None:
    assert "publish nothing of it" in error
    assert words in faults(error).get(name, ""), error
    assert "Traceback" not in error


def moved_tag(case: Case) -> None:
    git(case.root, "tag", "--force", f"v{case.release}", "HEAD~1")


def no_tag(case: Case) -> None:
    git(case.root, "tag", "--delete", f"v{case.release}")


def dirty(case: Case) -> None:
    (case.root / "notes.txt").write_text("more", encoding="utf-8")


def changelog(old: str, new: str) -> Fault:
    def plant(case: Case) -> None:
        path = case.root / "CHANGELOG.md"
        text = path.read_text(encoding="utf-8")
        old_here, new_here = (one.format(version=case.release) for one in (old, new))
        assert old_here in text
        path.write_text(text.replace(old_here, new_here), encoding="utf-8")
        case.commit()

    return plant


def changed(name: str) -> Fault:
    """Sources that are not those of the record."""

    def plant(case: Case) -> None:
        with (case.root / name).open("a", encoding="utf-8") as opened:
            opened.write("\n")
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
        changelog("## {version} - 2026-01-31", "## Unreleased"),
        "found headings of Unreleased",
    ),
    "changelog without a date": (
        "changelog",
        changelog("## {version} - 2026-01-31", "## {version}"),
        "expected a date",
    ),
    "no record": ("GPU records", no_record, "found none; renew it"),
    "CUDA changed since the record": (
        "GPU records",
        changed("src/cuda/abi/info.cc"),
        "changed src/cuda/abi/info.cc; renew it on an NVIDIA A100: " + RENEWED,
    ),
    "CMake changed since the record": (
        "GPU records",
        changed("CMakeLists.txt"),
        "changed CMakeLists.txt; renew it",
    ),
    "kernels were added since the record": (
        "GPU records",
        changed("variants.toml"),
        "changed variants.toml; renew it",
    ),
    "Triton changed since the record": (
        "GPU records",
        changed("src/python/flashvar/backends/triton/__init__.py"),
        "Triton kernels: expected a record",
    ),
    "record of an unknown commit": (
        "GPU records",
        made_of(revision="c0ffee" * 6 + "c0ff"),
        "is not in this clone",
    ),
    "record of a dirty tree": ("GPU records", made_of(dirty=True), "is of no commit"),
    "record of an option": ("GPU records", made_of(revision="--all"), "is not in this clone"),
    "record of other sources": ("GPU records", same_version, "is of sources 111111111111"),
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
        "a part of the tests",
    ),
    "record of a run that was terminated": (
        "GPU records",
        lambda case: case.record(ended_early=True),
        "a part of the tests",
    ),
    "record of tests that were chosen": (
        "GPU records",
        lambda case: case.record(chosen=["-k", "test_forward"]),
        "a part of the tests",
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
        "of nvcc 12.9.86, the release's of 13.0.88",
    ),
    "record of another architecture": (
        "GPU records",
        lambda case: case.record(forced_architecture="sm_90"),
        "the binary of sm_80: expected a record",
    ),
}


@pytest.mark.parametrize("fault", TREES)
def test_checkout_that_is_no_release(
    fault: str, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    name, plant, words = TREES[fault]
    plant(case)
    assert check(case) == 9
    refused(capsys.readouterr().err, name, words)


@pytest.mark.parametrize("build", ["one", "two"])
def test_a_file_that_is_too_large(
    build: str, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    with (getattr(case, build) / case.names[BINARY]).open("wb") as opened:
        opened.truncate(1 << 34)
    assert check(case) == 9
    error = capsys.readouterr().err
    assert "expected at most 1,073,741,824 bytes, found 17,179,869,184" in error
    assert "publish nothing of it" in error


def test_notes_say_what_ran_nowhere(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "LAST", {})
    device = {"name": "NVIDIA H200", "capability": [9, 0]}
    system = {"devices": [device], "platform": "linux_x86_64", "interpreted": False}
    case.record(system=system, forced_architecture="sm_80")
    release_set.put_own(case)
    assert check(case) == 0, capsys.readouterr().err
    notes = (case.root / "build" / "proof" / proof.NOTES).read_text(encoding="utf-8")
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
def test_without_a_second_build(again: str, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    folder = case.one if again == "itself" else case.root / "nothing"
    assert check(case, again=folder) == 9
    error = capsys.readouterr().err
    assert set(faults(error)) == {"second build"}
    assert "expected the folder of a second build" in error


def test_wheels_that_do_not_work(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BREAK_THE_SMOKE_TEST", "1")
    assert check(case) == 9
    assert set(faults(capsys.readouterr().err)) == {"smoke"}


@contextmanager
def published(folder: Path) -> Iterator[str]:
    """An index of the files of a folder, served; its address."""
    site = folder.with_name(f"site-of-{folder.name}")
    index.write(folder, site)
    with serve.serving(site) as address:
        yield address


def other_bytes(case: Case) -> None:
    case.edit(PURE, "METADATA$", "Attention kernels", "Other kernels")


def test_other_bytes_on_the_index(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(case, one=case.one.with_name("earlier"), two=case.two.with_name("earlier-2"))
    shutil.copytree(case.one, other.one)
    shutil.copytree(case.two, other.two)
    other_bytes(other)
    with published(other.one) as address:
        assert check(case, "--index", address) == 9
    error = capsys.readouterr().err
    assert set(faults(error)) == {"index"}
    assert f"{case.names[PURE]}: expected the SHA-256 " in error
    assert case.names[BINARY] not in error
    assert "release this as another version" in error


def test_file_of_this_version_that_was_not_built(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = case.one.with_name("earlier")
    shutil.copytree(case.one, earlier)
    more = earlier / case.names[BINARY].replace("x86_64", "aarch64")
    shutil.copyfile(earlier / case.names[BINARY], more)
    with published(earlier) as address:
        assert check(case, "--index", address) == 9
    error = capsys.readouterr().err
    assert set(faults(error)) == {"index"}
    assert f"{more.name}: expected only the files of the release" in error


def unpublished(case: Case, address: str, output: Path) -> int:
    proved = case.root / "build" / "proof" / proof.FILE
    words = ["--proof", str(proved), "--index", address, "--output", str(output)]
    return main(["--root", str(case.root), "unpublished", str(case.one), *words])


@pytest.fixture
def proved(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A release that was checked, but for the smoke test, which another test is of."""
    monkeypatch.setattr(proof, "LAST", {})
    assert check(case) == 0
    return case


def test_what_an_index_lacks_is_uploaded(
    proved: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, output = tmp_path / "earlier", tmp_path / "upload"
    earlier.mkdir()
    shutil.copyfile(proved.one / proved.names[BINARY], earlier / proved.names[BINARY])
    with published(earlier) as address:
        assert unpublished(proved, address, output) == 0, capsys.readouterr().err
    assert f"there already: {STEM}" in capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {
        proved.names[name] for name in (SDIST, PURE, "factory")
    }
    for path in output.iterdir():
        assert path.read_bytes() == (proved.one / path.name).read_bytes()


def rehearsal(case: Case) -> None:
    path = case.root / "build" / "proof" / proof.FILE
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "tag": None}), encoding="utf-8")


def edit_proof(case: Case, old: str, new: str) -> None:
    path = case.root / "build" / "proof" / proof.FILE
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


AFTERWARDS: dict[str, tuple[Fault, str]] = {
    "byte that changed": (lambda case: flip(case.one / case.names[BINARY]), "that were proved"),
    "file that was added": (lambda case: add(case, "x-1.0.tar.gz"), "of no such file"),
    "no proof": (
        lambda case: (case.root / "build" / "proof" / proof.FILE).unlink(),
        "check-release writes this file",
    ),
    "rehearsal": (rehearsal, "found a rehearsal"),
    "file that is gone": (
        lambda case: (case.one / case.names[BINARY]).unlink(),
        "expected this file, found none",
    ),
    "every file is gone": (
        lambda case: [path.unlink() for path in case.one.iterdir()],
        "expected this file, found none",
    ),
    "tag without a name": (lambda case: edit_proof(case, f'"v{case.release}"', '""'), "the tag ''"),
    "tag twice": (
        lambda case: edit_proof(case, "{", '{"tag": null, '),
        "a key twice in one object",
    ),
    "proof of pairs": (
        lambda case: (case.root / "build" / "proof" / proof.FILE).write_text(
            '{"tag": "v1", "files": [[1, "' + "0" * 64 + '"]]}', encoding="utf-8"
        ),
        "no table of files",
    ),
    "proof of nothing": (
        lambda case: (case.root / "build" / "proof" / proof.FILE).write_text(
            '{"tag": "v1", "files": {}}', encoding="utf-8"
        ),
        "no files with their SHA-256",
    ),
}


@pytest.mark.parametrize("fault", AFTERWARDS)
def test_what_happens_after_the_proof(
    fault: str, proved: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, words = AFTERWARDS[fault]
    earlier = tmp_path / "earlier"
    shutil.copytree(proved.one, earlier)
    plant(proved)
    with published(earlier) as address:
        assert unpublished(proved, address, tmp_path / "upload") == 9
    assert words in capsys.readouterr().err
    assert not (tmp_path / "upload").exists()


def test_other_bytes_are_not_passed_over(
    proved: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(proved, one=tmp_path / "earlier", two=tmp_path / "earlier-2")
    shutil.copytree(proved.one, other.one)
    shutil.copytree(proved.two, other.two)
    other_bytes(other)
    with published(other.one) as address:
        assert unpublished(proved, address, tmp_path / "upload") == 9
    assert f"{proved.names[PURE]}: expected the SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "upload").exists()


def test_a_rehearsal_is_of_no_tag(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "LAST", {})
    git(case.root, "tag", "--delete", f"v{case.release}")
    words = ["check-release", str(case.one), "--again", str(case.two), "--python", sys.executable]
    assert main(["--root", str(case.root), *words]) == 0, capsys.readouterr().err
    assert "this is a rehearsal" in capsys.readouterr().out
    assert unpublished(case, "https://127.0.0.1:1", case.root / "upload") == 9
