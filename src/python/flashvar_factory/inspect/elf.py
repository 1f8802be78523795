"""Reads ELF files: 64 bit, little endian, as all our libraries and all cubins are.

Not by pyelftools, which takes 30 times as long for the cubins of a wheel (0.29 s against 0.01 s for
sm_90), trusts the counts and offsets it reads, and raises whatever its parts raise. The files that
an audit reads may be hostile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from flashvar_factory.errors import BuildError

MAGIC: Final = b"\x7fELF\x02\x01\x01"
# The first bytes of every ELF file, whatever its class.
ANY_MAGIC: Final = b"\x7fELF"
# Of one table of a file; the largest libraries of others have a third of it.
ENTRIES: Final = 1 << 20
NAME_BYTES: Final = 1 << 26  # of the names of one table
LOAD, DYNAMIC, GNU_STACK, GNU_RELRO = 1, 2, 0x6474E551, 0x6474E552  # kinds of segments
EXECUTE, WRITE = 1, 2  # flags of segments

_HEADER = struct.Struct("<16s2HI3QI6H")
_SECTION = struct.Struct("<2I4Q2I2Q")
_SEGMENT = struct.Struct("<2I6Q")
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_SYSTEM, _ABI_VERSION, _PADDING = 7, 8, 9  # their indices in e_ident
_STRTAB: Final = 3
_LONGEST_NAME: Final = 8192  # bytes: of a mangled name
_PIECE: Final = 1 << 16  # bytes that are looked through at a time
# Kinds of sections without bytes in the file: .bss, and a cubin's own global and shared memory.
NO_BITS: Final = 8
_NO_BITS: Final = frozenset({NO_BITS, 0x70000007, 0x7000000A, 0x70000015})
_ALLOCATED: Final = 2  # of sh_flags
_MERCURY: Final = 1 << 28  # of sh_flags in a cubin: for its second assembler, always with its bytes


class Section(NamedTuple):
    """One section of a file."""

    name: str
    kind: int  # sh_type
    flags: int
    address: int
    offset: int
    size: int  # in memory, where it has no bytes in the file
    link: int  # the index of the section that this one refers to
    info: int
    alignment: int
    content: memoryview

    @property
    def allocated(self) -> bool:
        """Whether it is loaded, and has bytes in the file."""
        return bool(self.flags & _ALLOCATED and self.kind not in _NO_BITS)


class Segment(NamedTuple):
    """One part of a file as it is loaded."""

    kind: int
    flags: int
    offset: int
    address: int
    file_size: int
    memory_size: int
    alignment: int


class Symbol(NamedTuple):
    """One entry of a table of symbols."""

    name: str
    kind: int
    binding: int
    visibility: int
    other: int  # all of st_other
    section: int  # 0: undefined
    value: int
    size: int


@dataclass(frozen=True)
class Elf:
    """A whole file."""

    where: str
    data: memoryview
    kind: int  # e_type
    machine: int  # e_machine
    system: int  # of e_ident: whose ABI it is
    version: int  # e_version
    abi_version: int  # of e_ident
    flags: int  # e_flags
    entry: int  # e_entry
    padding: bytes  # of e_ident: zeros
    sections: tuple[Section, ...]
    segments: tuple[Segment, ...]
    tables: tuple[tuple[int, int], ...]  # start and end of the headers and their tables

    def of_kind(self, kind: int) -> Section | None:
        """The first section of a kind, None when there is none of it."""
        return next((one for one in self.sections if one.kind == kind), None)

    def named(self, name: str) -> list[Section]:
        """All sections of a name."""
        return [self.sections[i] for i in self.numbers.get(name, ())]

    @cached_property
    def numbers(self) -> dict[str, list[int]]:
        """The numbers of the sections of each name."""
        found: dict[str, list[int]] = {}
        for number, one in enumerate(self.sections):
            found.setdefault(one.name, []).append(number)
        return found

    @property
    def unclaimed(self) -> int | None:
        """The first byte that is neither zero between its parts nor in one of them; None: none."""
        contents = ((one.offset, one.offset + len(one.content)) for one in self.sections)
        end = 0
        for start, stop in sorted([*self.tables, *contents]):
            if start > end and data_in(self.data[end:start]) is not None:
                return end
            end = max(end, stop)
        return end if end < len(self.data) else None

    def strings_of(self, section: Section) -> bytes:
        """The table of strings that a section refers to; BuildError when it refers to no such."""
        if section.link >= len(self.sections) or self.sections[section.link].kind != _STRTAB:
            raise _damaged(self.where, f"no table of strings for {section.name}")
        return self._tables[section.link]

    @cached_property
    def _tables(self) -> dict[int, bytes]:
        """The bytes of the tables of strings, by index: copied once, then searched."""
        return {i: bytes(one.content) for i, one in enumerate(self.sections) if one.kind == _STRTAB}

    def symbols(self, section: Section) -> Iterator[Symbol]:
        """The symbols of a table."""
        if len(section.content) % _SYMBOL.size:
            raise _damaged(self.where, f"{section.name} cut within a symbol")
        limit(len(section.content) // _SYMBOL.size, f"symbols in {section.name}", self.where)
        strings, names = self.strings_of(section), 0
        for name, info, other, index, value, size in _SYMBOL.iter_unpack(section.content):
            text = text_at(strings, name, self.where) if name else ""
            names += len(text)
            limit(names, f"bytes of names in {section.name}", self.where, NAME_BYTES)
            yield Symbol(text, info & 15, info >> 4, other & 3, other, index, value, size)

    def offset_of(self, address: int, size: int) -> int | None:
        """Where the bytes are that are loaded at `address`; None where no segment brings them."""
        for one in self.segments:
            start = address - one.address
            if one.kind == LOAD and start >= 0 and start + size <= one.file_size:
                return one.offset + start
        return None

    def at_address(self, address: int, size: int) -> memoryview | None:
        """The bytes that are loaded at `address`; None where no segment brings all of them."""
        offset = self.offset_of(address, size)
        return None if offset is None else self.data[offset : offset + size]


def parse(data: bytes | memoryview, where: str | Path) -> Elf:
    """Read a file that came from `where`.

    BuildError when it is no such ELF file, or one that contradicts itself.
    """
    view = memoryview(data)
    found = bytes(view[: len(MAGIC)])
    if found != MAGIC:
        raise BuildError(f"{where}: expected a 64-bit little-endian ELF file, found {found!r}")
    if len(view) < _HEADER.size:
        raise _damaged(where, "a truncated header")
    header = _HEADER.unpack_from(view)
    kind, machine, version, segment_table, section_table, flags = (
        header[i] for i in (1, 2, 3, 5, 6, 7)
    )
    header_size, segment_size, segment_count, section_size, count, names = header[8:]
    for name, wanted, size in (
        ("the header", _HEADER.size, header_size),
        ("a segment", _SEGMENT.size, segment_size if segment_count else _SEGMENT.size),
        ("a section", _SECTION.size, section_size if count else _SECTION.size),
    ):
        if size != wanted:
            raise _damaged(where, f"{size} bytes for {name} instead of {wanted}")
    segment_end = segment_table + segment_count * _SEGMENT.size
    section_end = section_table + count * _SECTION.size
    if (segment_count and segment_end > len(view)) or (count and section_end > len(view)):
        raise _damaged(where, "a truncated one: its tables end behind it")
    if not count or names >= count:
        raise _damaged(where, f"{count} sections, of which number {names} has their names")
    rows = list(_SECTION.iter_unpack(view[section_table:section_end]))
    contents = [_content(view, row, where) for row in rows]
    strings = bytes(contents[names])
    sections = tuple(
        Section(
            text_at(strings, name, where),
            *(kind, flags_, address, offset, size, link, info, alignment, held),
        )
        for (name, kind, flags_, address, offset, size, link, info, alignment, _), held in zip(
            rows, contents, strict=True
        )
    )
    segments = []
    for row in _SEGMENT.iter_unpack(view[segment_table:segment_end] if segment_count else b""):
        one = Segment(row[0], row[1], row[2], row[3], *row[5:])
        if one.offset + one.file_size > len(view):
            raise _damaged(where, "a truncated one: a segment ends behind it")
        segments.append(one)
    tables = ((0, _HEADER.size), (segment_table, segment_end), (section_table, section_end))
    return Elf(
        where=str(where),
        data=view,
        kind=kind,
        machine=machine,
        system=header[0][_SYSTEM],
        version=version,
        abi_version=header[0][_ABI_VERSION],
        flags=flags,
        entry=header[4],
        padding=header[0][_PADDING:],
        sections=sections,
        segments=tuple(segments),
        tables=tables if segment_count else tables[::2],
    )


def section(path: Path, name: str) -> bytes | None:
    """The bytes of the section called `name`, None when there is none of them.

    BuildError when the file is no such ELF file, or a truncated one.
    """
    found = parse(path.read_bytes(), path).named(name)
    return bytes(found[0].content) if found else None


def data_in(content: memoryview, start: int = 0) -> int | None:
    """The offset of the first byte from `start` on that is not zero; None where all are."""
    for at in range(start, len(content), _PIECE):
        piece = bytes(content[at : at + _PIECE])
        data = piece.lstrip(b"\0")
        if data:
            return at + len(piece) - len(data)
    return None


def limit(count: int, what: str, where: str | Path, most: int = ENTRIES) -> None:
    """BuildError where a table has more entries than any of use: each takes time and memory."""
    if count > most:
        raise BuildError(f"{where}: expected at most {most:,} {what}, found {count:,}")


def text_at(strings: bytes, offset: int, where: str | Path) -> str:
    """The zero-terminated text at `offset` of a table of strings; BuildError when there is none."""
    end = strings.find(b"\0", offset, offset + _LONGEST_NAME)
    if end < 0:
        raise _damaged(where, f"no text at byte {offset} of a table of strings")
    return strings[offset:end].decode(errors="replace")


def _content(view: memoryview, row: tuple[int, ...], where: str | Path) -> memoryview:
    kind, flags, offset, size = row[1], row[2], row[4], row[5]
    if kind == 0 or (kind in _NO_BITS and not flags & _MERCURY):
        return view[:0]
    if offset + size > len(view):
        raise _damaged(where, "a truncated one: a section ends behind it")
    return view[offset : offset + size]


def _damaged(where: str | Path, found: str) -> BuildError:
    return BuildError(f"{where}: expected a whole ELF file, found {found}")
