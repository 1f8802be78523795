"""Finds the nvcc that compiles: one on this machine, else the one from PyPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar.binaries.kinds import dotted
from flashvar_factory.config.selection_arguments import ToolkitChoice
from flashvar_factory.errors import ToolchainError
from flashvar_factory.toolchain.cross import Cross

# Release builds and whatever is found without being asked for.
MINIMUM: Final = (13, 0)
# What the sources still compile with, when CUDACXX names it.
MINIMUM_NAMED: Final = (12, 8)
USUAL_FOLDER: Final = Path("/usr/local/cuda")
# pyproject.toml's dependency group of the pinned toolkit, and where nox puts it: not beside torch,
# which pins another version of the same packages.
GROUP: Final = "toolchain"
PYPI_FOLDER: Final = "build/toolkit"

_VERSION = re.compile(r"release \d+\.\d+, V(?P<version>\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class Toolchain:
    """A CUDA compiler that may be used."""

    nvcc: Path
    version: str  # "13.0.88"
    library_dir: Path | None  # to be named with -L where nvcc does not find its own libraries
    origin: str  # in words: where it was found
    cross: Cross | None = None  # what it needs beside itself to compile for another processor
    launcher: tuple[
        str, ...
    ] = ()  # the command line of a compiler cache, before the compiler's own


@dataclass(frozen=True)
class NvccPath:
    """A path where nvcc may be."""

    origin: str
    path: Path
    from_cudacxx: bool = False  # taken or an error, never passed over


def find(choice: ToolkitChoice, environ: Mapping[str, str], root: Path) -> Toolchain:
    """The first nvcc that is new enough; ToolchainError with every path that was tried.

    Order: CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda (`choice` "system" ends here), then
    the PyPI packages in `root`/build/toolkit and on sys.path (`choice` "pypi" starts here).
    """
    paths: list[NvccPath] = []
    if choice != "pypi":
        paths += _on_this_machine(environ)
    if choice != "system":
        paths += _from_pypi(root)
    looked: list[str] = []
    for one in paths:
        version = _version(one.path)
        minimum = MINIMUM_NAMED if one.from_cudacxx else MINIMUM
        found = version or "no working nvcc"
        if version is not None and _release(version) >= minimum:
            return Toolchain(one.path, version, _library_dir(one.path), one.origin)
        looked.append(f"  {one.origin}: {one.path}: {found}")
        if one.from_cudacxx:
            break
    raise ToolchainError(
        f"expected nvcc {dotted(MINIMUM)} or newer ({dotted(MINIMUM_NAMED)} when CUDACXX names "
        f"it), found:\n" + ("\n".join(looked) or "  nothing") + "\n"
        "from PyPI: `nox -s build-dev` in a checkout of flashvar, or pip install "
        '"flashvar-factory[cuda]"'
    )


def _on_this_machine(environ: Mapping[str, str]) -> Iterator[NvccPath]:
    named = environ.get("CUDACXX")
    if named:
        found = shutil.which(named, path=environ.get("PATH"))
        # Absolute: CMake runs in another folder, and `nvcc` for `./nvcc` would be that of PATH.
        path = Path(found or named).absolute() if found or os.sep in named else Path(named)
        yield NvccPath("CUDACXX", path, from_cudacxx=True)
        return
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    if on_path:
        yield NvccPath("PATH", Path(on_path).absolute())
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(variable):
            yield NvccPath(variable, Path(environ[variable], "bin", "nvcc").absolute())
    yield NvccPath("the usual folder", USUAL_FOLDER / "bin" / "nvcc")


def _from_pypi(root: Path) -> Iterator[NvccPath]:
    for folder in (root / PYPI_FOLDER, *map(Path, sys.path)):
        for nvcc in sorted(folder.glob("nvidia/cu*/bin/nvcc")):
            yield NvccPath("PyPI", nvcc.resolve())


def _version(nvcc: Path) -> str | None:
    try:
        command = [str(nvcc), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    match = _VERSION.search(done.stdout)
    return match["version"] if match else None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _library_dir(nvcc: Path) -> Path | None:
    """The libraries of the PyPI layout: in lib, where nvcc itself looks in lib64."""
    home = nvcc.parent.parent
    if (home / "lib64").exists() or not (home / "lib" / "libcudart_static.a").is_file():
        return None
    return home / "lib"
