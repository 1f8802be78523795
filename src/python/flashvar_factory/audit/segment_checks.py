"""Checks each program header against the sections that it is made of: a loader reads no others."""

from __future__ import annotations

from collections.abc import Iterator

from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.inspect import elf

_READ = 4
# Of a part that is loaded: data that is read, code, data that is written.
_ACCESS = (_READ, _READ | elf.EXECUTE, _READ | elf.WRITE)
_SMALLEST, _LARGEST = 1 << 12, 1 << 21  # pages of processors, and what linkers align parts to
_NOTE, _HEADERS, _TLS, _FRAMES, _PROPERTY, _STEPS = 4, 6, 7, 0x6474E550, 0x6474E553, 0x6474E554
# The access rights that segments beside the loaded ones may have; those that are not here: reading.
_PLAIN = {elf.DYNAMIC: (_READ, _READ | elf.WRITE), elf.GNU_STACK: (_READ | elf.WRITE,)}
_NAMED = {_FRAMES: ".eh_frame_hdr", _PROPERTY: ".note.gnu.property", _STEPS: ".sframe"}
_NOTES = 7  # kind of section
_THREADS, _ALLOCATED, _WRITABLE, _CODE = 0x400, 2, 1, 4  # of sh_flags
# Of what is loaded: those; merged, texts, with a section's number, kept, large data of x86.
_FLAGS = _THREADS | _ALLOCATED | _WRITABLE | _CODE | 0x10 | 0x20 | 0x40 | 0x200000 | 0x10000000
# Kinds of sections that are loaded: code and data, zeros, notes, and tables that a loader reads.
_KINDS = (1, 3, 4, 5, 6, 7, 8, 11, 14, 15, 16, 19, *range(0x6FFFFFFD, 0x70000000), 0x6FFFFFF6)
_UNWINDING = 0x70000001  # the kind of .eh_frame on x86
_STRINGS = 3
# What a linker relocates and then protects, where it is there; and what programs write to.
_PROTECTED = (".init_array", ".fini_array", ".data.rel.ro", ".dynamic", ".got")
_WRITTEN = (".data", ".bss")
# Of the notes that are loaded, by kind: the hash of the build, and properties of the code.
_BUILD_ID, _PROPERTIES = 3, 5
_OWNER = b"GNU\0"
_HASH_BYTES = range(8, 65)  # of a build
# Properties by number, with the bits they may have: of x86, shadow stacks and branch targets; of
# aarch64, branch targets and signed addresses; of x86, the instructions that are used, if at all.
_FEATURES = {0xC0000000: 3, 0xC0000002: 3, 0xC0010001: 0xFFFFFFFF, 0xC0010002: 0xFFFFFFFF}


def segments(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """Each segment has the location, size and access rights that its sections need."""
    del expected
    for library in wheel.libraries:
        for message in (
            *_loaded(library.file),
            *_of_sections(library.file),
            *_threads(library.file),
            *_accessed(library.file),
            *_protected(library.file),
            *_notes(library),
        ):
            yield Finding("segments", library.path, message)


def _loaded(file: elf.Elf) -> Iterator[str]:
    parts = [one for one in file.segments if one.kind == elf.LOAD]
    for one in parts:
        if one.flags not in _ACCESS:
            yield (
                f"expected a part that is read, executed or written alone, found the flags "
                f"{one.flags:#x} of the one at {one.address:#x}"
            )
        if not _is_power(one.alignment) or not _SMALLEST <= one.alignment <= _LARGEST:
            yield (
                f"expected the part at {one.address:#x} to be aligned to a power of two from "
                f"{_SMALLEST} to {_LARGEST}, found {one.alignment}"
            )
        elif (one.address - one.offset) % one.alignment:
            yield (
                f"expected p_vaddr = p_offset modulo {one.alignment}, the alignment of the part at "
                f"{one.address:#x}, found {one.offset:#x}"
            )
    for section in file.sections:
        end = section.address + section.size
        if _is_loaded(section) and not any(
            one.address <= section.address and end <= one.address + one.memory_size for one in parts
        ):
            yield f"expected {section.name} in a part that is loaded, found it in none"
    for one in file.segments:
        if one.kind != elf.LOAD and one.flags not in _PLAIN.get(one.kind, (_READ,)):
            yield f"expected a segment {one.kind:#x} that is read alone, found flags {one.flags:#x}"
        if one.kind == elf.DYNAMIC and one.memory_size != one.file_size:
            yield "expected the dynamic section as long in memory as in the file, found another"
        stated = one.offset, one.address, one.file_size, one.memory_size
        if one.kind == elf.GNU_STACK and any(stated):
            yield "expected a stack of the usual size (PT_GNU_STACK), found an address or a size"


def _of_sections(file: elf.Elf) -> Iterator[str]:
    """Tables that programs find by a program header."""
    notes = [one for one in file.sections if one.kind == _NOTES and one.flags & _ALLOCATED]
    for one in file.segments:
        place = (one.offset, one.address, one.file_size)
        if one.kind in _NAMED:
            name = _NAMED[one.kind]
            homes = [(it.offset, it.address, it.size) for it in file.named(name)]
        elif one.kind == _HEADERS:
            name = "the program headers"
            start, end = file.tables[1]
            homes = [(start, one.address, end - start)]
            if file.offset_of(one.address, end - start) != start:
                homes = []
        elif one.kind == _NOTE:
            name = "a section of notes"
            homes = [
                (first.offset, first.address, last.offset + last.size - first.offset)
                for first in notes
                for last in notes
            ]
        else:
            continue
        if place not in homes or one.memory_size != one.file_size:
            yield f"expected segment {one.kind:#x} at the location of {name}, found it elsewhere"


def _threads(file: elf.Elf) -> Iterator[str]:
    """The variables of threads: what is copied for each, and how much more is zero."""
    held = [one for one in file.sections if one.flags & _THREADS]
    parts = [one for one in file.segments if one.kind == _TLS]
    if len(parts) != bool(held):
        yield f"expected a segment of threads' variables, found {len(parts)}"
    if len(parts) != 1 or not held:
        return
    first = held[0].address
    wanted = (
        held[0].offset,
        first,
        max([one.address + one.size - first for one in held if one.kind != elf.NO_BITS] or [0]),
        max(one.address + one.size for one in held) - first,
        max(one.alignment for one in held),
    )
    (one,) = parts
    if (one.offset, one.address, one.file_size, one.memory_size, one.alignment) != wanted or (
        not _is_power(one.alignment)
    ):
        yield "expected threads' variables as .tdata and .tbss have them, found other sizes"


def _accessed(file: elf.Elf) -> Iterator[str]:
    """Sections have the access rights of their segment: tools read those, loaders these."""
    parts = [one for one in file.segments if one.kind == elf.LOAD]
    for one in (each for each in file.sections if each.flags & _ALLOCATED):
        usual = one.kind in _KINDS and (one.kind != _STRINGS or one.name == ".dynstr")
        if not usual and (one.name, one.kind) != (".eh_frame", _UNWINDING):
            yield f"expected {one.name} to be of a kind that is loaded, found {one.kind:#x}"
        if one.alignment & (one.alignment - 1) or one.address % max(one.alignment, 1):
            yield (
                f"expected {one.name} to be aligned to a power of two, found {one.alignment} at "
                f"{one.address:#x}"
            )
        part = next(
            (it for it in parts if it.address <= one.address < it.address + it.memory_size), None
        )
        if part is None or not one.size:
            continue
        is_written = bool(one.flags & _WRITABLE)
        if (
            one.flags & ~_FLAGS
            or is_written != bool(part.flags & elf.WRITE)
            or (one.flags & _CODE and not part.flags & elf.EXECUTE)
        ):
            yield (
                f"expected flags of {one.name} as its part has them ({part.flags:#x}), found "
                f"{one.flags:#x}"
            )


def _protected(file: elf.Elf) -> Iterator[str]:
    """What is relocated is read-only then, and what is written to stays writable."""
    for part in (one for one in file.segments if one.kind == elf.GNU_RELRO):
        start, end = part.address, part.address + part.memory_size
        homes = [
            one
            for one in file.segments
            if one.kind == elf.LOAD
            and one.address <= start
            and end <= -(-(one.address + one.memory_size) // _SMALLEST) * _SMALLEST
        ]
        if not homes or part.offset - part.address != homes[0].offset - homes[0].address:
            yield "expected PT_GNU_RELRO within a part that is loaded, found it elsewhere"
        for one in file.sections:
            inside = start <= one.address and one.address + one.size <= end
            if one.name in _PROTECTED and one.size and not inside:
                yield f"expected {one.name} within PT_GNU_RELRO, found it outside"
            first, last = start // _SMALLEST * _SMALLEST, end // _SMALLEST * _SMALLEST
            touched = one.address < last and first < one.address + one.size
            if one.name in _WRITTEN and one.size and touched:
                yield f"expected {one.name} outside of PT_GNU_RELRO, found it within"


def _notes(library: Library) -> Iterator[str]:
    """Loaders refuse, or run otherwise, a library whose notes say that it needs more."""
    for section in library.file.sections:
        if section.kind != _NOTES or not section.flags & _ALLOCATED:
            continue
        content, at, unit = section.content, 0, section.alignment
        while at < len(content):
            owner, size, kind = (
                int.from_bytes(content[at + i : at + i + 4], "little") for i in (0, 4, 8)
            )
            text = content[at + 16 : at + 16 + size]
            named = owner == len(_OWNER) and bytes(content[at + 12 : at + 16]) == _OWNER
            if not named or unit not in (4, 8):
                yield f"expected notes of GNU in {section.name}, found others"
                break
            if len(text) < size or kind not in (_BUILD_ID, _PROPERTIES):
                yield f"expected a build's hash or properties in {section.name}, found kind {kind}"
            elif kind == _BUILD_ID and size not in _HASH_BYTES:
                yield f"expected a hash of 8 to 64 bytes in {section.name}, found {size:,} bytes"
            elif kind == _PROPERTIES:
                yield from _properties(text, section.name)
            at += 16 + -(-size // unit) * unit


def _properties(content: memoryview, name: str) -> Iterator[str]:
    at = 0
    while at < len(content):
        kind, size, bits = (
            int.from_bytes(content[at + i : at + i + 4], "little") for i in (0, 4, 8)
        )
        if size != 4 or bits & ~_FEATURES.get(kind, 0):
            yield (
                f"expected properties in {name} that every processor of the platform has, found "
                f"{kind:#x} with {bits:#x}"
            )
            return
        at += 16  # padded to 8


def _is_loaded(section: elf.Section) -> bool:
    """Whether it takes memory that is not each thread's own."""
    zeroed = section.kind == elf.NO_BITS and not section.flags & _THREADS
    return section.size > 0 and (section.allocated or (zeroed and bool(section.flags & _ALLOCATED)))


def _is_power(number: int) -> bool:
    return number > 0 and not number & (number - 1)
