"""Builds the same sources twice, in two folders, and compares the bytes.

The second build runs in a longer path, in another time zone, with another umask and another order
of Python's sets: what of these reaches a file is a difference.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from flashvar.errors import ConfigurationError
from flashvar_factory.build import process, source
from flashvar_factory.errors import BuildError, ReproducibilityError
from flashvar_factory.release import difference
from flashvar_factory.toolchain.nvcc import Toolchain


class Conditions(NamedTuple):
    """The folder, umask and environment that a build runs in."""

    folder: str
    umask: int
    environment: Mapping[str, str]


CONDITIONS: Final = (
    Conditions("one", 0o022, MappingProxyType({"PYTHONHASHSEED": "1", "TZ": "UTC"})),
    Conditions(
        "two/in-a-longer-path", 0o077, MappingProxyType({"PYTHONHASHSEED": "2", "TZ": "XYZ-9"})
    ),
)
_COPY: Final = "project"
# Nothing that a build reads: at the top of a project, and anywhere.
_NOT_READ: Final = frozenset({".git", ".nox", "build", "dist"})
_CACHE: Final = "__pycache__"


def build_twice(
    selection: Sequence[str], toolchain: Toolchain, *, root: Path, folder: Path
) -> tuple[Path, ...]:
    """Run `wheels` in two copies of the checkout; the two folders of files.

    Raises:
        ConfigurationError: `folder` has something that no earlier call left.
        BuildError: a build failed.
    """
    _clear(folder)
    copies = [folder / one.folder / _COPY for one in CONDITIONS]
    for copy in copies:  # both now: the checkout may change meanwhile
        copy_sources(root, copy, folder)
    return tuple(
        _build(conditions, selection, toolchain, copy, root)
        for conditions, copy in zip(CONDITIONS, copies, strict=True)
    )


def build_again(
    selection: Sequence[str], toolchain: Toolchain, *, root: Path, folder: Path
) -> Path:
    """Run `wheels` in one copy, under the second conditions; the folder of files."""
    _clear(folder)
    conditions = CONDITIONS[-1]
    copy = folder / conditions.folder / _COPY
    copy_sources(root, copy, folder)
    return _build(conditions, selection, toolchain, copy, root)


def _clear(folder: Path) -> None:
    """Remove what an earlier call left in a folder; ConfigurationError where it has anything else.

    It may be a folder of the user, such as the project's own.
    """
    if not folder.exists():
        return
    copies = {folder / one.folder / _COPY for one in CONDITIONS}
    above = {parent for copy in copies for parent in copy.parents if parent.is_relative_to(folder)}
    others = sorted(
        str(path.relative_to(folder))
        for parent in above
        if parent.is_dir()
        for path in parent.iterdir()
        if path not in copies and not (path in above and path.is_dir())
    )
    if others or not folder.is_dir():
        raise ConfigurationError(
            f"{folder}: expected a folder of an earlier run, an empty one or none, found "
            f"{others[0] if others else 'a file'}, which stays as it is; name another folder"
        )
    for copy in copies:
        shutil.rmtree(copy, ignore_errors=True)


def require(one: Iterable[Path], two: Iterable[Path], where: str) -> None:
    """ReproducibilityError with the first difference of two builds' files, if there is one."""
    if found := difference.of_builds(one, two):
        raise ReproducibilityError(
            f"expected the same bytes from two builds, found a difference in {found}; {where}"
        )


def _build(
    conditions: Conditions, selection: Sequence[str], toolchain: Toolchain, copy: Path, root: Path
) -> Path:
    # The compiler is given, and a cache would compare its memory with itself.
    passed = [word for word in selection if not word.startswith(("toolkit=", "cache="))]
    home = copy if root == source.HOME else source.HOME
    environment = {
        **os.environ,
        **conditions.environment,
        "PYTHONPATH": str(home / "src" / "python"),
        "CUDACXX": str(toolchain.nvcc),
    }
    command = [sys.executable, "-m", "flashvar_factory", "--root", str(copy), "wheels", *passed]
    print(f"building in {copy}", flush=True)
    done = process.run(command, env=environment, umask=conditions.umask)
    if done.returncode != 0:
        raise BuildError(f"{copy}: `wheels` ended with exit code {done.returncode}, see above")
    return copy / "dist"


def copy_sources(root: Path, to: Path, work: Path) -> None:
    """Copy a checkout as it is, with its revision; outside of one, the folder, but not `work`."""
    if source.committed(root) is None:
        ignore = partial(_not_read, root, work)
        shutil.copytree(root, to, ignore=ignore, ignore_dangling_symlinks=True)
    else:
        _copy_checkout(root, to)
    for toolkit in (root / "build").glob("toolkit*"):  # what a build fetches when it lacks
        (to / "build").mkdir(exist_ok=True)
        (to / "build" / toolkit.name).symlink_to(toolkit)


def _not_read(root: Path, work: Path, folder: str, names: list[str]) -> set[str]:
    """The names in a folder of a project that are not copied."""
    ignored = {name for name in names if name == _CACHE or Path(folder, name) == work}
    return ignored.union(_NOT_READ.intersection(names)) if Path(folder) == root else ignored


def _copy_checkout(root: Path, to: Path) -> None:
    """Copy a checkout, and those of its submodules."""
    to.parent.mkdir(parents=True, exist_ok=True)
    source.run(root, "clone", "--quiet", "--no-checkout", str(root), str(to))
    source.run(to, "reset", "--quiet")
    for name in source.names(root):
        file = root / name
        # A link of the commit is one in the copy too, else that differs from the commit.
        link = file.is_symlink() and file.resolve().is_relative_to(root)
        if source.is_checkout(file):
            _copy_checkout(file, to / name)
        elif file.is_dir() and not file.is_symlink():  # of a submodule that was left out
            (to / name).mkdir(parents=True)
        elif link or file.is_file():  # not one that was deleted here
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, to / name, follow_symlinks=not link)
