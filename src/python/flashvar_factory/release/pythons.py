"""Finds the Pythons of this machine, to install wheels into."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar.errors import ConfigurationError
from flashvar_factory.errors import SmokeError

MINIMUM: Final = (3, 10)
# What venv and pip need of a Python; a shim of a version manager, or a Python cut down, fails here.
_PROBE: Final = (
    "import sys, venv, ensurepip, ssl, sysconfig;"
    "print(*sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0, sys.executable)"
)
_PATIENCE: Final = 20  # seconds


@dataclass(frozen=True, order=True)
class Python:
    """An interpreter that can make virtual environments."""

    version: tuple[int, int]
    free_threaded: bool
    executable: Path

    @property
    def tag(self) -> str:
        """The ABI tag of its wheels: cp313, cp314t."""
        return f"cp{self.version[0]}{self.version[1]}{'t' if self.free_threaded else ''}"


def find(environ: Mapping[str, str]) -> tuple[Python, ...]:
    """One Python of each version from 3.10 on: this one, those on PATH, those of pyenv and uv."""
    found: dict[str, Python] = {}
    for candidate in dict.fromkeys(_candidates(environ)):
        python = probe(candidate)
        if python is not None and python.version >= MINIMUM:
            found.setdefault(python.tag, python)
    return tuple(sorted(found.values()))


def named(paths: Iterable[Path]) -> tuple[Python, ...]:
    """The Pythons at `paths`; ConfigurationError for one that will not do."""
    found = []
    for path in paths:
        python = probe(path)
        if python is None or python.version < MINIMUM:
            what = "none" if python is None else ".".join(map(str, python.version))
            raise ConfigurationError(
                f"{path}: expected a Python 3.10 or newer with venv, ensurepip and ssl, "
                f"found {what}; on Debian these are in python3-venv"
            )
        found.append(python)
    return tuple(found)


def require(found: Sequence[Python]) -> None:
    """SmokeError where there is no Python to install into."""
    if not found:
        raise SmokeError("expected a Python 3.10 or newer with venv, found none; install one")


def probe(path: Path) -> Python | None:
    """The Python at `path`, None where none starts or it cannot make environments."""
    try:
        done = subprocess.run(
            [str(path), "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PATIENCE
        )
        major, minor, free_threaded, executable = done.stdout.strip().split(" ", 3)
        return Python((int(major), int(minor)), free_threaded == "1", Path(executable))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    yield Path(sys.executable)
    home = Path(environ.get("HOME", "/"))
    for folder in environ.get("PATH", "").split(os.pathsep):
        yield from sorted(Path(folder).glob("python3.[0-9]*[0-9t]")) if folder else ()
    yield from sorted(
        Path(environ.get("PYENV_ROOT", home / ".pyenv")).glob("versions/*/bin/python")
    )
    data = Path(environ.get("XDG_DATA_HOME", home / ".local" / "share"))
    yield from sorted(data.glob("uv/python/*/bin/python3"))
