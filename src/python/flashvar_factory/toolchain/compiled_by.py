"""Records which compilers filled a CMake folder, and empties it for others.

CMake keeps what it learned of a compiler, and ninja keeps an object until its command or one of its
files changes. Neither sees that a compiler was replaced.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flashvar_factory.toolchain.nvcc import Toolchain

FILE: Final = "compiled_by.json"
# What CMake reads when it first looks at a folder, and never again; and what nvcc and the C++
# compiler read at each call, which ninja does not know of.
_VARIABLES: Final = (
    *("CXXFLAGS", "CUDAFLAGS", "LDFLAGS"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"),
    *("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
)


def facts(toolchain: Toolchain, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Every compiler that a build calls, with its version, and the flags of the environment."""
    found = {"nvcc": f"{toolchain.nvcc} ({toolchain.version})"}
    if toolchain.cross is None:
        found["C++"] = _compiler(environ.get("CXX") or "c++", environ)
        found["nvcc's C++"] = _compiler(environ.get("CUDAHOSTCXX") or "gcc", environ)
    else:
        found["C++"] = _compiler(str(toolchain.cross.compiler), environ)
        found["CUDA libraries"] = str(toolchain.cross.libraries)
    return found | {name: environ[name] for name in _VARIABLES if environ.get(name)}


def claim(folder: Path, now: Mapping[str, str]) -> None:
    """Empty `folder` unless the compilers of `now` filled it, and record `now` beside it."""
    record = folder.with_name(FILE)
    before = _read(record)
    if before == dict(now):
        return
    record.unlink(missing_ok=True)  # first: an interrupted removal leaves no record
    if folder.is_dir():
        print(f"{folder}: starts empty: {_difference(before, now)}", flush=True)
        shutil.rmtree(folder)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(dict(now), indent=1), encoding="utf-8")


def _compiler(given: str, environ: Mapping[str, str]) -> str:
    """The path of a command's program, and the first line of the version it prints."""
    try:
        program, *arguments = shlex.split(given) or [given]
    except ValueError:  # a quotation without an end, which CMake reports
        return given
    path = shutil.which(program, path=environ.get("PATH"))
    if path is None:  # CMake reports it
        return given
    command = [path, *arguments, "--version"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=dict(environ)
        )
        printed = done.stdout
    except OSError:
        printed = ""
    version = printed.partition("\n")[0].strip() or "no version"
    return f"{' '.join([path, *arguments])} ({version})"


def _read(record: Path) -> dict[str, str] | None:
    try:
        read: dict[str, str] = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read


def _difference(before: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """The first fact that differs, in words."""
    if before is None:
        return "nothing records what compiled it"
    name = next(name for name in {**now, **before} if before.get(name) != now.get(name))
    return f"{name} was {before.get(name, 'not set')}, is {now.get(name, 'not set')}"
