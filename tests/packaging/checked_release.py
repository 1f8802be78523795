"""What tests of a release call, and read of the answer; the fixtures are in conftest.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from fake_release import Case

from flashvar_factory.cli import main
from flashvar_factory.release import checks

Fault = Callable[[Case], object]

SDIST, PURE, BINARY = "sdist", "pure", "binary"


def check(case: Case, *words: str, tag: str | None = None, again: Path | None = None) -> int:
    given = ["check-release", str(case.one), "--second-build", str(again or case.two)]
    given += ["--tag", tag or f"v{case.release}", "--python", sys.executable, *words]
    return main(["--root", str(case.root), *given])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def add(case: Case, name: str, content: bytes = b"") -> None:
    for folder in (case.one, case.two):
        (folder / name).write_bytes(content)


def faults(error: str) -> dict[str, str]:
    """The message of each check that failed."""
    found: dict[str, str] = {}
    name = ""
    for line in error.splitlines()[1:]:
        before, colon, behind = line.partition(": ")
        if colon and before in {**checks.CHECKS, **checks.LAST}:
            name = before
            found[name] = behind
        else:
            found[name] += f"\n{line}"
    return found
