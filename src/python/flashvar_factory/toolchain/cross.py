"""Finds what compiles for another processor: a C++ compiler of apt's, the CUDA runtime of PyPI.

nvcc itself stays this machine's: it takes the processor from the host compiler that it calls.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar_factory.config import this_machine
from flashvar_factory.errors import CrossToolchainError, ToolchainError
from flashvar_factory.toolchain import pypi

# By platform: what Debian calls the machine, and the tag its CUDA wheels have on PyPI.
TRIPLETS: Final = {"x86_64": "x86-64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
RUNTIME: Final = "nvidia-cuda-runtime"
FOLDER: Final = "build/toolkit-{platform}-{version}"


_INCLUDES = re.compile(r'INCLUDES="-I(?P<path>[^"]+)"')


@dataclass(frozen=True)
class Cross:
    """A compiler for another processor, and the CUDA runtime of it."""

    platform: str
    compiler: Path
    headers: Path  # of the toolkit: with another host compiler, nvcc looks for others
    libraries: Path  # holds libcudart_static.a of that processor


def find(
    platform: str, nvcc: Path, version: str, *, environ: Mapping[str, str], root: Path
) -> Cross | None:
    """What `platform` needs; None for this machine's own. Fetches the CUDA runtime where it lacks.

    `version` is nvcc's. CrossToolchainError, naming the packages, when there is no compiler or the
    runtime cannot be had.
    """
    if platform == this_machine.PROCESSOR:
        return None
    compiler = _compiler(TRIPLETS[platform], environ)
    folder = root / FOLDER.format(platform=platform, version=version)
    libraries = runtime(f"{RUNTIME}=={version.rpartition('.')[0]}.*", platform, folder)
    return Cross(platform, compiler, _headers(nvcc), libraries)


def _compiler(triplet: str, environ: Mapping[str, str]) -> Path:
    # Debian names packages x86-64, commands x86_64.
    command = f"{triplet.replace('x86-64', 'x86_64')}-g++"
    found = shutil.which(command, path=environ.get("PATH", ""))
    if found is None:
        raise CrossToolchainError(
            f"expected the cross compiler {command} on PATH, found none; "
            f"apt-get install g++-{triplet} (and qemu-user, to load what it made here)"
        )
    return Path(found)


def _headers(nvcc: Path) -> Path:
    """Where nvcc looks for the CUDA headers when it compiles for this machine."""
    command = [str(nvcc), "--dryrun", "-c", "-x", "cu", os.devnull]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    match = _INCLUDES.search(done.stdout)
    if match is None:
        raise CrossToolchainError(
            f"expected {nvcc} --dryrun to print INCLUDES=..., found: {done.stdout.strip()}"
        )
    return Path(match["path"]).resolve()


def runtime(requirement: str, platform: str, folder: Path) -> Path:
    """The libraries of a processor's CUDA runtime, unpacked in `folder`; fetched where missing.

    CrossToolchainError when it cannot be had.
    """
    if not _libraries(folder):
        try:
            pypi.fetch(requirement, platform, folder)
        except ToolchainError as error:
            raise CrossToolchainError(str(error)) from None
    found = _libraries(folder)
    if not found:
        raise CrossToolchainError(
            f"{folder}: expected libcudart_static.a of {requirement}, found none; remove the folder"
        )
    return found[-1]


def _libraries(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("nvidia/cu*/lib/libcudart_static.a"))
