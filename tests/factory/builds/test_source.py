"""What the factory says where git cannot read a checkout, which is not the same as none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from committed import commit_all

from flashvar_factory.build import source
from flashvar_factory.errors import CheckoutError
from flashvar_factory.release import checkout, reproduce, tag

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with one commit."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "CMakeLists.txt").write_text("x", encoding="utf-8")
    commit_all(root)
    return root


@pytest.fixture
def another_owner(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files of the project were another user's, which git's own tests pretend so."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


ASKED = {
    "revision of a manifest": lambda root: source.gather(root, "plan"),
    "time of an archive's files": source.committed,
    "files of an sdist": source.listed,
    "commit of a release": checkout.revision,
    "tag of a release": lambda root: tag.require("v1.0", root, "1.0", "a" * 40),
    "files of a GPU test record": lambda root: source.touched(root, "HEAD", ["."]),
    "lines of a GPU test record": lambda root: source.lines(root, "x", ["."]),
    "code of a GPU test record": lambda root: source.has_other_code(root, "HEAD", "a.cu"),
    "copy for a second build": lambda root: reproduce.copy_sources(
        root, root.parent / "copy", root.parent
    ),
}


@pytest.mark.usefixtures("another_owner")
@pytest.mark.parametrize("asked", ASKED)
def test_a_checkout_of_another_user(asked: str, project: Path) -> None:
    with pytest.raises(CheckoutError) as raised:
        ASKED[asked](project)
    words = str(raised.value)
    assert f"{project}: expected a checkout that git reads, found `fatal: detected dubious" in words
    assert f"git config --global --add safe.directory {project}" in words


def test_a_trusted_checkout_of_another_user(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    config = project.parent / "gitconfig"
    config.write_text(f"[safe]\n\tdirectory = {project}\n", encoding="utf-8")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    revision, dirty = source.stated(project)
    assert revision is not None
    assert dirty is False


@pytest.mark.usefixtures("another_owner")
def test_a_folder_inside_a_checkout_of_another_user(project: Path) -> None:
    """It is no checkout itself, whoever owns the one above."""
    inside = project / "inside"
    inside.mkdir()
    assert source.stated(inside) == (None, None)


def test_a_checkout_without_git(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project / "nowhere"))
    with pytest.raises(CheckoutError, match="expected git for this checkout, found none"):
        source.stated(project)
    assert source.stated(project.parent) == (None, None)


def test_a_link_to_no_checkout(tmp_path: Path) -> None:
    """As a worktree's or a submodule's files copied without the repository that they belong to."""
    (tmp_path / ".git").write_text("gitdir: /nowhere/.git/worktrees/one\n", encoding="utf-8")
    with pytest.raises(CheckoutError, match="found `fatal: not a git repository: /nowhere"):
        source.stated(tmp_path)


def test_a_checkout_with_a_damaged_index(project: Path) -> None:
    (project / ".git" / "index").write_bytes(b"damaged" * 10)
    with pytest.raises(CheckoutError, match="expected `git status` to succeed, found"):
        source.stated(project)


def test_a_checkout_without_a_commit(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert source.stated(tmp_path) == (None, None)
    assert source.committed(tmp_path) is None


def test_settings_of_the_user_that_hide_files(project: Path) -> None:
    """A file that git ignores for this user alone is compiled all the same."""
    subprocess.run(
        ["git", "-C", str(project), "config", "status.showUntrackedFiles", "no"], check=True
    )
    (project / "new.cmake").write_text("x", encoding="utf-8")
    assert source.stated(project)[1] is True
    with pytest.raises(CheckoutError, match=r"found changes\n  \?\? new\.cmake"):
        checkout.revision(project)


def test_changes_are_those_of_git_status(project: Path) -> None:
    (project / "CMakeLists.txt").write_text("changed", encoding="utf-8")
    assert source.changes(project) == [" M CMakeLists.txt"]


def test_a_signature_that_git_shows(project: Path) -> None:
    """With log.showSignature, git prints what verified a commit before what it was asked for."""
    verifier = project.parent / "verifier"
    verifier.write_text("#!/bin/sh\necho a signature >&2; exit 1\n", encoding="utf-8")
    verifier.chmod(0o755)
    git = ["git", "-C", str(project)]
    for key, value in (("log.showSignature", "true"), ("gpg.program", str(verifier))):
        subprocess.run([*git, "config", key, value], check=True)
    commit = subprocess.run([*git, "cat-file", "-p", "HEAD"], check=True, capture_output=True)
    signed = commit.stdout.replace(b"\n\n", b"\ngpgsig -----BEGIN PGP SIGNATURE-----\n\n", 1)
    written = subprocess.run(
        [*git, "hash-object", "-t", "commit", "-w", "--stdin"],
        input=signed,
        check=True,
        capture_output=True,
    )
    subprocess.run([*git, "reset", "-q", written.stdout.decode().strip()], check=True)
    assert source.committed(project) == int(commit.stdout.split(b"> ")[1].split()[0])


@pytest.mark.parametrize("variable", ["GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"])
def test_variables_of_another_checkout(
    variable: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook of git has them, and so has each command that it runs."""
    stated = source.stated(project)
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", "--template=", str(other)], check=True)
    paths = {"GIT_DIR": other / ".git", "GIT_INDEX_FILE": other / "index", "GIT_WORK_TREE": other}
    monkeypatch.setenv(variable, str(paths[variable]))
    assert source.stated(project) == stated
    reproduce.copy_sources(project, tmp_path / "copy", tmp_path)
    assert source.stated(tmp_path / "copy") == stated


def test_names_in_a_locale_that_is_not_utf8(project: Path, tmp_path: Path) -> None:
    """Python then decodes names of files in that encoding, and git's are the same bytes."""
    checkout = project.rename(tmp_path / "größe")
    (checkout / "maß.cuh").write_text("x", encoding="utf-8")
    code = (
        "import os, sys; from pathlib import Path; from flashvar_factory.build import source;"
        "root = Path(os.path.realpath('.')); names = source.listed(root);"
        "print(source.stated(root)[1], sorted(map(os.fsencode, names or ())))"
    )
    environment = {
        **os.environ,
        **{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        "PYTHONPATH": str(ROOT / "src" / "python"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"True {[b'CMakeLists.txt', 'maß.cuh'.encode()]}\n", done.stderr


def test_a_copy_has_the_links_of_the_commit(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.h"
    outside.write_text("outside", encoding="utf-8")
    (project / "folder").mkdir()
    (project / "folder" / "file").write_text("x", encoding="utf-8")
    (project / "file").symlink_to("folder/file")
    (project / "linked").symlink_to("folder")
    (project / "gone").symlink_to("nowhere")
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["add", "."], ["commit", "-qm", "links"]):
        subprocess.run([*git, *words], check=True)
    reproduce.copy_sources(project, tmp_path / "copy", tmp_path)
    assert source.stated(tmp_path / "copy") == source.stated(project)
    (project / "folder" / "outside.h").symlink_to("../../outside.h")
    reproduce.copy_sources(project, tmp_path / "a" / "deeper" / "copy", tmp_path)
    copied = tmp_path / "a" / "deeper" / "copy" / "folder" / "outside.h"
    assert copied.read_text(encoding="utf-8") == "outside"


@pytest.fixture
def with_submodules(project: Path, tmp_path: Path) -> Path:
    """The project with a library of its own repository among its sources, and one left out."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "tile.cuh").write_text("tile", encoding="utf-8")
    commit_all(library)
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    git += ["-c", "protocol.file.allow=always"]
    for name in ("src/cuda/library", "left-out"):
        subprocess.run([*git, "submodule", "--quiet", "add", str(library), name], check=True)
    subprocess.run([*git, "commit", "-qm", "submodules"], check=True)
    subprocess.run([*git, "submodule", "--quiet", "deinit", "left-out"], check=True)
    return project


@pytest.mark.parametrize("state", ["committed", "changed", "at another commit"])
def test_a_copy_has_the_submodules(state: str, with_submodules: Path, tmp_path: Path) -> None:
    library = with_submodules / "src" / "cuda" / "library"
    if state != "committed":
        (library / "tile.cuh").write_text("another", encoding="utf-8")
    if state == "at another commit":
        user = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(library), *user, "commit", "-qam", "another"], check=True)
    copy = tmp_path / "copy"
    reproduce.copy_sources(with_submodules, copy, tmp_path)
    copied = (copy / "src" / "cuda" / "library" / "tile.cuh").read_text(encoding="utf-8")
    assert copied == ("tile" if state == "committed" else "another")
    assert source.stated(with_submodules)[1] == (state != "committed")
    assert source.gather(copy, "plan") == source.gather(with_submodules, "plan")
    assert source.changes(copy) == source.changes(with_submodules)


def test_files_of_submodules_belong_to_the_sdist(with_submodules: Path) -> None:
    assert source.listed(with_submodules) == {
        ".gitmodules",
        "CMakeLists.txt",
        "src/cuda/library/tile.cuh",
    }


def test_a_copy_outside_a_checkout(tmp_path: Path) -> None:
    project, work = tmp_path / "project", tmp_path / "project" / "work"
    names = ["CMakeLists.txt", "src/build/a.cuh", "src/dist/b.cuh", "build/made", "dist/a.whl"]
    for name in (*names, "src/__pycache__/a.pyc", "work/earlier"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x", encoding="utf-8")
    (project / "gone").symlink_to("nowhere")
    copy = work / "one" / "project"
    reproduce.copy_sources(project, copy, work)
    copied = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert copied == set(names[:3])


def test_a_copy_that_git_refuses(project: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "file").write_text("x", encoding="utf-8")
    with pytest.raises(CheckoutError, match="expected `git clone` to succeed, found `fatal: "):
        reproduce.copy_sources(project, tmp_path / "copy", tmp_path)


@pytest.mark.usefixtures("another_owner")
def test_a_benchmark_of_a_checkout_of_another_user(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    environment = import_module("benchmarks.environment")
    report = import_module("benchmarks.report")
    monkeypatch.setattr(environment, "ROOT", project)
    with pytest.raises(report.BenchmarkError, match=r"dubious .*safe\.directory"):
        environment.source({}, [{"revision": "b" * 40, "dirty": False}])
    named = environment.source({"BENCH_REVISION": "a" * 40}, [])
    assert named == {"revision": "a" * 40, "dirty": False, "from": "BENCH_REVISION"}
