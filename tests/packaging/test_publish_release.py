"""What is published after the checks of a release: what an index lacks, with the bytes checked."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from checked_release import BINARY, PURE, SDIST, Fault, add, check, faults, flip
from checkout import git
from fake_release import STEM, Case

from flashvar_factory import index
from flashvar_factory.cli import main
from flashvar_factory.index import serve
from flashvar_factory.release import checks, steps

FACTORY = "flashvar-factory"

pytestmark = pytest.mark.usefixtures("on_paper")


@contextmanager
def published(folder: Path) -> Iterator[str]:
    """An index of the files of a folder, served; its address."""
    site = folder.with_name(f"site-of-{folder.name}")
    index.write(folder, site)
    with serve.serving(site) as address:
        yield address


def other_bytes(case: Case) -> None:
    case.edit(PURE, "METADATA$", "Attention kernels", "Other kernels")


def test_other_bytes_on_the_index(case_files: Case, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(
        case_files,
        one=case_files.one.with_name("earlier"),
        two=case_files.two.with_name("earlier-2"),
    )
    shutil.copytree(case_files.one, other.one)
    shutil.copytree(case_files.two, other.two)
    other_bytes(other)
    with published(other.one) as address:
        assert check(case_files, "--index", address) == 9
    error = capsys.readouterr().err
    assert set(faults(error)) == {"index"}
    assert f"{case_files.names[PURE]}: expected the SHA-256 " in error
    assert case_files.names[BINARY] not in error
    assert "release this as another version" in error


def test_file_of_this_version_that_was_not_built(
    case_files: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = case_files.one.with_name("earlier")
    shutil.copytree(case_files.one, earlier)
    more = earlier / case_files.names[BINARY].replace("x86_64", "aarch64")
    shutil.copyfile(earlier / case_files.names[BINARY], more)
    with published(earlier) as address:
        assert check(case_files, "--index", address) == 9
    error = capsys.readouterr().err
    assert set(faults(error)) == {"index"}
    assert f"{more.name}: expected only the files of the release" in error


def hashes_of(case: Case) -> Path:
    """Where what was checked of a copy of the files is written."""
    return case.one.with_name("checked") / checks.FILE


def unpublished(case: Case, address: str, output: Path) -> int:
    words = ["--checked", str(hashes_of(case)), "--index", address, "--output", str(output)]
    return main(["--root", str(case.root), "select-unpublished", str(case.one), *words])


@pytest.fixture(scope="module")
def hashes_text(made: Case, on_paper: None, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a check of the release wrote, but for the smoke test, which another test is of."""
    output = tmp_path_factory.mktemp("checked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAST", {})
        assert check(made, "--output", str(output)) == 0
    return (output / checks.FILE).read_bytes()


@pytest.fixture
def checked(case_files: Case, hashes_text: bytes) -> Case:
    """A copy of the files that were checked, with the hashes of what was checked."""
    hashes_of(case_files).parent.mkdir()
    hashes_of(case_files).write_bytes(hashes_text)
    return case_files


def test_what_an_index_lacks_is_uploaded(
    checked: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, output = tmp_path / "earlier", tmp_path / "upload"
    earlier.mkdir()
    shutil.copyfile(checked.one / checked.names[BINARY], earlier / checked.names[BINARY])
    with published(earlier) as address:
        assert unpublished(checked, address, output) == 0, capsys.readouterr().err
    assert f"there already: {STEM}" in capsys.readouterr().out
    files = {path for path in output.rglob("*") if path.is_file()}
    assert {str(path.relative_to(output)) for path in files} == {
        f"{project}/{checked.names[name]}"
        for name, project in ((SDIST, "flashvar"), (PURE, "flashvar"), ("factory", FACTORY))
    }
    for path in files:
        assert path.read_bytes() == (checked.one / path.name).read_bytes()


def rehearsal(case: Case) -> None:
    path = hashes_of(case)
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "tag": None}), encoding="utf-8")


def edit_proof(case: Case, old: str, new: str) -> None:
    path = hashes_of(case)
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def capitals(case: Case) -> None:
    digest = steps.digest(case.one / case.names[BINARY])
    edit_proof(case, digest, digest.upper())


def moved(case: Case, put: Callable[[Path], object]) -> None:
    path = case.one / case.names[BINARY]
    path.rename(case.one.with_name("moved"))
    put(path)


AFTERWARDS: dict[str, tuple[Fault, str]] = {
    "byte that changed": (lambda case: flip(case.one / case.names[BINARY]), "that were checked"),
    "file that was added": (lambda case: add(case, "x-1.0.tar.gz"), "of no such file"),
    "no hashes": (
        lambda case: hashes_of(case).unlink(),
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
    "tag of another version": (
        lambda case: edit_proof(case, f'"v{case.release}"', '"v9.9"'),
        "the tag 'v9.9' of the version",
    ),
    "another version": (
        lambda case: [
            edit_proof(case, f'"version": "{case.release}"', '"version": "9.9"'),
            edit_proof(case, f'"v{case.release}"', '"v9.9"'),
        ],
        "files of other versions",
    ),
    "another schema": (lambda case: edit_proof(case, '"schema": 1', '"schema": 2'), "the schema 2"),
    "no commit": (lambda case: edit_proof(case, '"revision"', '"commit"'), "other keys, ['commit'"),
    "hashes in capitals": (
        lambda case: capitals(case),
        "no files with their SHA-256",
    ),
    "pipe that was added": (lambda case: os.mkfifo(case.one / "pipe"), "found a link, a folder"),
    "pipe in place of a file": (
        lambda case: moved(case, os.mkfifo),
        "found a link, a folder or something else",
    ),
    "link in place of a file": (
        lambda case: moved(case, lambda path: path.symlink_to(path.parent.with_name("moved"))),
        "found a link, a folder or something else",
    ),
    "tag twice": (
        lambda case: edit_proof(case, "{", '{"tag": null, '),
        "a key twice in one object",
    ),
    "hashes in pairs": (
        lambda case: hashes_of(case).write_text(
            '{"tag": "v1", "files": [[1, "' + "0" * 64 + '"]]}', encoding="utf-8"
        ),
        "no table of files",
    ),
    "hashes of nothing": (
        lambda case: hashes_of(case).write_text('{"tag": "v1", "files": {}}', encoding="utf-8"),
        "no files with their SHA-256",
    ),
}


@pytest.mark.parametrize("fault", AFTERWARDS)
def test_what_happens_after_the_proof(
    fault: str, checked: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, words = AFTERWARDS[fault]
    earlier = tmp_path / "earlier"
    shutil.copytree(checked.one, earlier)
    plant(checked)
    with published(earlier) as address:
        assert unpublished(checked, address, tmp_path / "upload") == 9
    assert words in capsys.readouterr().err
    assert not (tmp_path / "upload").exists()


def test_other_bytes_are_not_passed_over(
    checked: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(checked, one=tmp_path / "earlier", two=tmp_path / "earlier-2")
    shutil.copytree(checked.one, other.one)
    shutil.copytree(checked.two, other.two)
    other_bytes(other)
    with published(other.one) as address:
        assert unpublished(checked, address, tmp_path / "upload") == 9
    assert f"{checked.names[PURE]}: expected the SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "upload").exists()


def test_a_rehearsal_is_of_no_tag(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "LAST", {})
    git(case.root, "tag", "--delete", f"v{case.release}")
    words = [
        "check-release",
        str(case.one),
        "--second-build",
        str(case.two),
        "--python",
        sys.executable,
    ]
    words += ["--output", str(hashes_of(case).parent)]
    assert main(["--root", str(case.root), *words]) == 0, capsys.readouterr().err
    assert "this is a rehearsal" in capsys.readouterr().out
    assert unpublished(case, "https://127.0.0.1:1", case.root / "upload") == 9
