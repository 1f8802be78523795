"""ELF files that no linker made: their sections, and how they are loaded."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

X86_64, CUDA = 62, 190
NOTES = 7  # a kind of section
SYMBOL = struct.Struct("<IBBHQQ")
GLOBAL_FUNCTION, WEAK, KERNEL, SECTION = 0x12, 0x20, 0x10, 3
ALLOCATED, EXECUTABLE = 2, 4  # flags of sections
LOADED_CODE = ALLOCATED | EXECUTABLE


class Section(NamedTuple):
    name: str
    kind: int = 1
    content: bytes = b""
    link: int = 0
    flags: int = 0
    info: int = 0


class Segment(NamedTuple):
    """One part as it is loaded; of a section where one is named, else of the whole file."""

    kind: int
    flags: int
    section: str | None = None


# Code that is no data, a dynamic section, a stack that is no code, relocations that are read-only.
RELRO = Segment(0x6474E552, 4, ".dynamic")
LOADED = (Segment(1, 5), Segment(2, 4, ".dynamic"), Segment(0x6474E551, 6), RELRO)
PAGE = 4096


def elf(
    machine: int,
    sections: Sequence[Section],
    flags: int = 0,
    abi: int = 0,
    segments: Sequence[Segment] = (),
) -> bytes:
    """A file of these sections; they are numbered from 1, and loaded where they are in the file."""
    names, offsets = string_table([section.name for section in (*sections, Section(".shstrtab"))])
    every = [*sections, Section(".shstrtab", 3, names)]
    places = addresses(every, len(segments))
    body, rows = b"", [bytes(64)]
    for section, name in zip(every, offsets, strict=True):
        at, size = places[section.name], len(section.content)
        address = at if section.flags & ALLOCATED and machine != CUDA else 0
        rows.append(
            struct.pack(
                "<2I4Q2I2Q",
                *(name, section.kind, section.flags, address, at, size, section.link),
                *(section.info, _alignment(section, machine), 0),
            )
        )
        body += section.content
    start = 64 + 56 * len(segments)
    table = start + len(body)
    loaded = b""
    for one in segments:
        at = places[one.section] if one.section else 0
        sizes = {section.name: len(section.content) for section in every}
        size = sizes[one.section] if one.section else table if one.kind == 1 else 0
        loaded += struct.pack(
            "<2I6Q", one.kind, one.flags, at, at, at, size, size, PAGE if one.kind == 1 else 1
        )
    # A cubin is a program of CUDA, whose format 7 had numbers of its own.
    kind, system, version = (2, *((0x33, 0x81) if abi == 7 else (0x41, 1)))
    if machine != CUDA:
        kind, system, version = 3, 0, 1
    header = struct.pack(
        "<16s2HI3QI6H",
        b"\x7fELF\x02\x01\x01" + bytes([system, abi]),
        *(kind, machine, version, 0, 64 if segments else 0, table, flags),
        *(64, 56, len(segments), 64, len(rows), len(rows) - 1),
    )
    return header + loaded + body + b"".join(rows)


def _alignment(section: Section, machine: int) -> int:
    if machine == CUDA and section.name.startswith(".text."):
        return 128
    return 4 if section.kind == NOTES else 1


def addresses(sections: Sequence[Section], segments: int) -> dict[str, int]:
    """Where each section is, in the file and in memory; of one name, the last."""
    places, position = {}, 64 + 56 * segments
    for section in sections:
        places[section.name] = position
        position += len(section.content)
    return places


def string_table(texts: Sequence[str]) -> tuple[bytes, list[int]]:
    """A table of these texts, and where each of them is in it."""
    table, offsets = b"\0", []
    for text in texts:
        offsets.append(len(table))
        table += text.encode() + b"\0"
    return table, offsets
