"""This checkout, where one test process builds at a time, and committed copies to release from."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process of the tests builds in this checkout, and keep them waiting."""
    lock = ROOT / "build" / "tests.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def committed_copy(folder: Path) -> Path:
    """Copy the sources into `folder`, commit them there, and share the toolkit."""
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in sorted(set(listed.split("\0")) - {""}):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder.parent, "init", "--quiet", str(folder))
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "As it is now")
    toolkit = ROOT / "build" / "toolkit"
    if toolkit.is_dir():
        (folder / "build").mkdir(exist_ok=True)
        (folder / "build" / "toolkit").symlink_to(toolkit)
    return folder
