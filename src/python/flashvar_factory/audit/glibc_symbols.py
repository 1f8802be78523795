"""What the oldest glibc of a wheel's tag exports: a loader finds nothing else there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from flashvar_factory.audit.platform_tag import Version
from flashvar_factory.build import source
from flashvar_factory.inspect.dynamic import Undefined

GLIBC: Final[Version] = (2, 28)


def file_name(platform: str) -> str:
    """The list of a processor in the folder of CMake's files, which stubs are made of."""
    return f"glibc-{GLIBC[0]}.{GLIBC[1]}-{platform}.syms"


@cache
def listed(platform: str) -> Mapping[tuple[str, str], str]:
    """The library of each symbol and its version; nothing where the processor has no list."""
    path = source.HOME / source.CMAKE / file_name(platform)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = (line.split() for line in lines if line and not line.startswith("#"))
    return {(name, version): library for name, version, library, *_ in rows}


def home(symbol: Undefined, platform: str) -> str | None:
    """The library that exports a symbol; None where none does."""
    return listed(platform).get((symbol.name, symbol.version or ""))
