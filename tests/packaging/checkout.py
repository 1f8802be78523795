"""Checkouts, where one test process builds at a time, and copies and projects to build instead."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import fewer_ops

from flashvar_factory.build import example

ROOT = Path(__file__).parents[2]


@contextmanager
def alone(checkout: Path = ROOT) -> Iterator[None]:
    """Wait until no other process of the tests builds in a checkout, and keep them waiting."""
    lock = checkout / "build" / "tests.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def committed_copy(
    folder: Path, changed: Mapping[str, bytes] | None = None, without: tuple[str, ...] = ()
) -> Path:
    """Copy the sources into `folder`, but for what is `changed`; commit them; share the toolkit.

    Of an earlier copy there, what stays the same keeps its time, so that it is not compiled again.
    Paths that begin with one of `without` are left out.
    """
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = {
        name
        for name in listed.split("\0")
        if name and not name.startswith(without) and (ROOT / name).is_file()
    }
    if not (folder / ".git").is_dir():
        git(folder.parent, "init", "--quiet", str(folder))
    for name in set(git(folder, "ls-files", "-z").split("\0")) - names - {""}:
        (folder / name).unlink(missing_ok=True)
    for name in sorted(names):
        content = (changed or {}).get(name) or (ROOT / name).read_bytes()
        if not (folder / name).is_file() or (folder / name).read_bytes() != content:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)  # with its mode
            (folder / name).write_bytes(content)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "As it is now")
    share_toolkit(folder)
    return folder


def copied_sources(folder: Path, *groups: str) -> Path:
    """Copy what a build takes of the project, with the host's sources of some ops: `attention`."""
    left_out = {Path(name).name for name in fewer_ops.other_sources(*groups)}
    for name in ("variants.toml", "CMakeLists.txt", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("cmake", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=lambda _, names: left_out & {*names})
    share_toolkit(folder)
    return folder


def small_project(folder: Path) -> Path:
    """Write the small project into `folder`, for what does not depend on the kernels."""
    example.write("vecadd", folder)
    share_toolkit(folder)
    return folder


def share_toolkit(folder: Path) -> None:
    """Let a project in `folder` compile with the toolkit of this checkout, if it has one."""
    toolkit, link = ROOT / "build" / "toolkit", folder / "build" / "toolkit"
    if toolkit.is_dir() and not link.is_symlink():
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(toolkit)
