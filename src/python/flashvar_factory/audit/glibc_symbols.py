"""What the oldest glibc of a wheel's tag exports: a loader finds nothing else there."""

from __future__ import annotations

from collections import defaultdict
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
def listed(platform: str) -> Mapping[tuple[str, str], frozenset[str]]:
    """The libraries of each symbol and its version; nothing where the processor has no list.

    Some are in two: `write` is libc's and libpthread's.
    """
    path = source.HOME / source.CMAKE / file_name(platform)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    homes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for line in lines:
        if line and not line.startswith("#"):
            name, version, library, *_ = line.split()
            homes[name, version].add(library)
    return {symbol: frozenset(libraries) for symbol, libraries in homes.items()}


def homes(symbol: Undefined, platform: str) -> frozenset[str]:
    """The libraries that export a symbol; empty where none does."""
    return listed(platform).get((symbol.name, symbol.version or ""), frozenset())
