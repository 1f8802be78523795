"""Reads PTX: its version, the architecture it is for, its kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from flashvar_factory.errors import BuildError

_HEAD: Final = re.compile(
    rb"(?:\s|//[^\n]*\n){0,9999}\.version\s+(?P<major>\d{1,3})\.(?P<minor>\d{1,3})"
    rb"\s+\.target\s+sm_(?P<code>\d{2,3}[af]?)\s+\.address_size\s+64\s"
)
# A kernel, what it says between its parameters and its body, and its largest block.
_ENTRY: Final = re.compile(rb"\.entry\s+(?P<name>[\w$]+)(?P<options>[^{;]*)\{")
_BLOCK: Final = re.compile(rb"\.(?:max|req)ntid\s+(\d{1,9})(?:,\s*(\d{1,9}))?(?:,\s*(\d{1,9}))?")
_LINES: Final = re.compile(rb"^[ \t]*(\.(?:file|loc|section)\b[^\n]{0,200})", re.MULTILINE)
# PTX within other bytes. Comments may stand where blanks may. All is bounded, as every place in a
# file may be a beginning.
_TARGET: Final = re.compile(rb"\.target(?=[\s/])")
_OF_ARCHITECTURE: Final = re.compile(
    rb"(?:\s|//[^\n\0]{0,200}\n|/\*[^*\0]{0,200}\*/){1,100}(?:sm|compute)_\d"
)
_BEGINNINGS: Final = 4096  # that are looked at: of other files none has ten
_SHOWN: Final = 40


class Kernel(NamedTuple):
    """One of its entries."""

    name: str  # mangled
    threads: int | None  # of the largest block, where it says so


class Ptx(NamedTuple):
    """What PTX states of itself."""

    version: tuple[int, int]
    code: str  # e.g. "90a"
    kernels: tuple[Kernel, ...]


def read(text: memoryview, where: str) -> Ptx:
    """Read PTX; BuildError if it is not PTX, is cut off, or has more than a driver compiles."""
    match = _HEAD.match(text)
    if match is None:
        raise BuildError(
            f"{where}: expected PTX that begins with .version, .target and .address_size 64, found "
            f"{bytes(text[:_SHOWN])!r}; compile for 64 bits, without -G"
        )
    whole = bytes(text).rstrip(b"\0")
    if b"\0" in whole or whole.count(b"{") != whole.count(b"}"):
        raise BuildError(
            f"{where}: expected whole PTX, found a zero byte in it, or a brace that is not closed; "
            "build it again"
        )
    line = _LINES.search(whole)
    if line is not None:
        found = line[1].decode(errors="replace")
        raise BuildError(
            f"{where}: expected PTX without lines of the sources, found {found}; "
            "compile without -lineinfo and -G"
        )
    version = int(match["major"]), int(match["minor"])
    return Ptx(version, match["code"].decode(), tuple(_kernels(whole)))


def _kernels(text: bytes) -> Iterator[Kernel]:
    for match in _ENTRY.finditer(text):
        block = _BLOCK.search(match["options"])
        sizes = [int(size) for size in block.groups() if size] if block else None
        yield Kernel(match["name"].decode(), math.prod(sizes) if sizes else None)


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
