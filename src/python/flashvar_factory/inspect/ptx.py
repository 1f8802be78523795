"""Reads the first lines of PTX: its version, and the architecture it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from flashvar_factory.errors import BuildError

_HEAD: Final = re.compile(
    rb"(?:\s|//[^\n]*\n){0,9999}\.version\s+(?P<major>\d{1,3})\.(?P<minor>\d{1,3})"
    rb"\s+\.target\s+sm_(?P<code>\d{2,3}[af]?)\b"
)
# PTX within other bytes. Comments may stand where blanks may. All is bounded, as every place in a
# file may be a beginning.
_TARGET: Final = re.compile(rb"\.target(?=[\s/])")
_OF_ARCHITECTURE: Final = re.compile(
    rb"(?:\s|//[^\n\0]{0,200}\n|/\*[^*\0]{0,200}\*/){1,100}(?:sm|compute)_\d"
)
_BEGINNINGS: Final = 4096  # that are looked at: of other files none has ten
_SHOWN: Final = 40


class Ptx(NamedTuple):
    """What PTX states of itself."""

    version: tuple[int, int]
    code: str  # e.g. "90a"


def read(text: memoryview, where: str) -> Ptx:
    """Read PTX; BuildError when it is none, or no text."""
    match = _HEAD.match(text)
    if match is None or b"\0" in bytes(text).rstrip(b"\0"):
        raise BuildError(
            f"{where}: expected PTX that begins with .version and .target, found "
            f"{bytes(text[:_SHOWN])!r}"
        )
    return Ptx((int(match["major"]), int(match["minor"])), match["code"].decode())


def places(data: bytes | memoryview) -> Iterator[int]:
    """Where PTX is within other bytes; where very much may be, all behind counts as one."""
    for number, match in enumerate(_TARGET.finditer(data)):
        if number == _BEGINNINGS or _OF_ARCHITECTURE.match(data, match.end()):
            yield match.start()
        if number == _BEGINNINGS:
            return


def within(data: bytes | memoryview) -> bool:
    """Whether there is any."""
    return next(places(data), None) is not None
