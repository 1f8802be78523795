"""Reads ELF files: 64 bit, little endian, as all our libraries and all cubins are.

Not by pyelftools, which takes 30 times as long for the cubins of a wheel (0.29 s against 0.01 s for
sm_90), trusts the counts and offsets it reads, and raises whatever its parts raise. The files that
an audit reads may be hostile.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final, NamedTuple

from flashvar_factory.errors import BuildError

MAGIC: Final = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<16s2HI3QI6H")
_SECTION = struct.Struct("<2I4Q2I2Q")
_ABI_VERSION = 8  # its place in e_ident
# Kinds of sections without bytes in the file: .bss, and a cubin's own global and shared memory.
_NO_BITS: Final = frozenset({8, 0x70000007, 0x7000000A, 0x70000015})


class Section(NamedTuple):
    """One section of a file."""

    name: str
    kind: int  # sh_type
    link: int  # the index of the section that this one refers to
    content: memoryview


class Elf(NamedTuple):
    """A whole file."""

    machine: int  # e_machine
    abi_version: int  # of e_ident
    flags: int  # e_flags
    sections: tuple[Section, ...]

    def of_kind(self, kind: int) -> Section | None:
        """The first section of a kind, None when there is none of it."""
        return next((one for one in self.sections if one.kind == kind), None)


def parse(data: bytes | memoryview, where: str | Path) -> Elf:
    """Read a file that came from `where`.

    BuildError when it is no such ELF file, or a truncated one.
    """
    view = memoryview(data)
    found = bytes(view[: len(MAGIC)])
    if found != MAGIC:
        raise BuildError(f"{where}: expected a 64-bit little-endian ELF file, found {found!r}")
    try:
        return _parse(view)
    except (struct.error, IndexError, ValueError) as error:
        raise BuildError(f"{where}: expected a whole ELF file, found a truncated one") from error


def section(path: Path, name: str) -> bytes | None:
    """The bytes of the section called `name`, None when there is none of them.

    BuildError when the file is no such ELF file, or a truncated one.
    """
    sections = parse(path.read_bytes(), path).sections
    return next((bytes(one.content) for one in sections if one.name == name), None)


def text_at(strings: memoryview, offset: int) -> str:
    """The zero-terminated text at `offset` of a table of strings."""
    if offset >= len(strings):
        raise IndexError(offset)
    # Names are short: a window first, so that a large table is not copied for each of them.
    for size in (256, 16384, len(strings)):
        text, end, _ = bytes(strings[offset : offset + size]).partition(b"\0")
        if end:
            return text.decode(errors="replace")
    raise IndexError(offset)


def _parse(view: memoryview) -> Elf:
    header = _HEADER.unpack_from(view)
    table, entry_size, count, names_index = (header[i] for i in (6, 11, 12, 13))
    rows = [_SECTION.unpack_from(view, table + i * entry_size) for i in range(count)]
    contents = [_content(view, row) for row in rows]
    sections = (
        Section(text_at(contents[names_index], row[0]), row[1], row[6], content)
        for row, content in zip(rows, contents, strict=True)
    )
    return Elf(header[2], header[0][_ABI_VERSION], header[7], tuple(sections))


def _content(view: memoryview, row: tuple[int, ...]) -> memoryview:
    kind, offset, size = row[1], row[4], row[5]
    if kind in _NO_BITS:
        return view[:0]
    if offset + size > len(view):
        raise IndexError(offset)
    return view[offset : offset + size]
