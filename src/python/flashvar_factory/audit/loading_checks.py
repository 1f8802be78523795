"""Checks how a library is loaded: its header, its segments, and that no byte of it is hidden."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.inspect import device_code, dynamic, elf, fatbin

_INTERPRETER = 3
# Those above, notes, headers, data of threads, and what GNU adds: unwinding, properties, tables.
_SEGMENTS = frozenset({1, 2, _INTERPRETER, 4, 6, 7, *range(0x6474E550, 0x6474E555)})
_DEBUGGING = (".debug", ".zdebug", ".gnu_debug")
_SYSTEMS = (0, 3)  # of e_ident: no system's in particular, and Linux's
_PAGE = 4096
_ALLOCATED = 2  # of sh_flags
# What linkers write that is not loaded: of compilers and for probes; names of sections and symbols.
_UNLOADED = re.compile(
    r"\.(?:comment|note\..+|annobin\.notes|(?:gnu\.build|gnu|ARM)\.attributes.*)"
)
_OF_NAMES = (".shstrtab", ".strtab", ".symtab", ".symtab_shndx")
_UNLOADED_BYTES = 1 << 16


def loading(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The memory of a loaded library is that of its sections, and read-only where possible."""
    del expected
    for library in wheel.libraries:
        for message in (
            *_header(library),
            *_segments(library),
            *_layout(library),
            *_sections(library),
            *_hidden(library),
        ):
            yield Finding("loading", library.path, message)


def _header(library: Library) -> Iterator[str]:
    file = library.file
    if file.kind != dynamic.SHARED_OBJECT:
        yield f"expected a shared library, found an ELF file of type {file.kind}"
    found = (file.system in _SYSTEMS, file.abi_version, file.version, file.flags, file.entry)
    if found != (True, 0, 1, 0, 0) or any(file.padding):
        yield (
            "expected the ELF header of a shared library for Linux, found OS ABI "
            f"{file.system}, ABI version {file.abi_version}, version {file.version}, flags "
            f"{file.flags:#x}, entry point {file.entry:#x}, padding {file.padding.hex()}"
        )


def _segments(library: Library) -> Iterator[str]:
    file = library.file
    stacks = [one for one in file.segments if one.kind == elf.GNU_STACK]
    if len(stacks) != 1 or stacks[0].flags & elf.EXECUTE:
        yield "expected a stack that is not executable, found none such; link with -z noexecstack"
    for one in file.segments:
        if one.kind == elf.LOAD and one.flags & elf.WRITE and one.flags & elf.EXECUTE:
            yield f"expected no writable and executable segment, found one at {one.address:#x}"
        if one.kind == elf.LOAD and one.memory_size < one.file_size:
            yield f"expected memory for all bytes of the segment at {one.address:#x}, found less"
        if one.kind == elf.LOAD and one.memory_size > one.file_size + _zeroed(file) + _PAGE:
            yield (
                f"expected memory for .bss alone behind the segment at {one.address:#x}, found "
                f"{one.memory_size - one.file_size:,} bytes"
            )
        if one.kind not in _SEGMENTS:
            yield f"expected known segments, found one of type {one.kind:#x}"
        if one.kind == _INTERPRETER:
            yield "expected a library, found a program: it names an interpreter (PT_INTERP)"
    dynamic_section = [(one.address, one.size) for one in file.named(".dynamic")]
    relocated = [
        one
        for one in file.segments
        for address, size in dynamic_section
        if one.kind == elf.GNU_RELRO
        and one.address <= address
        and address + size <= one.address + one.memory_size
    ]
    if not relocated or not library.dynamic.bind_now:
        yield (
            "expected full RELRO (PT_GNU_RELRO around .dynamic, and BIND_NOW), found less; link "
            "with -z relro -z now"
        )


def _zeroed(file: elf.Elf) -> int:
    """The bytes of the sections that are loaded as zeros."""
    return sum(one.size for one in file.sections if one.kind == elf.NO_BITS)


def _layout(library: Library) -> Iterator[str]:
    """Segments are loaded one behind the other, by pages: none replaces a part of another."""
    loaded = [one for one in library.file.segments if one.kind == elf.LOAD]
    for one in loaded:
        if (one.address - one.offset) % _PAGE:
            yield f"expected p_vaddr = p_offset modulo {_PAGE}, found a segment at {one.address:#x}"
    for one, following in pairwise(loaded):
        end, start = one.address + one.memory_size, following.address
        shared = start // _PAGE * _PAGE < end
        if start < end or (shared and start - following.offset != one.address - one.offset):
            yield f"expected no segments that overlap, found {start:#x} within the one before"


def _sections(library: Library) -> Iterator[str]:
    """Sections are what an auditor reads, segments what a loader does: they are the same bytes."""
    file = library.file
    for one in file.sections:
        if one.allocated and one.size and file.offset_of(one.address, one.size) != one.offset:
            yield f"expected {one.name} where the segment of its address is, found it elsewhere"
        if one.name.startswith(_DEBUGGING):
            yield f"expected no debug information, found {one.name}; strip the library"
        elif not _is_usual(one):
            yield (
                "expected names and short notes alone in sections that are not loaded, found "
                f"{one.size:,} bytes in {one.name}; strip the library"
            )
        if one.name in fatbin.SECTIONS and one.size and not one.allocated:
            yield f"expected {one.name} in a loaded segment, found it in none"
    counts = Counter(one.name for one in file.sections if one.name)
    for name in sorted(name for name, count in counts.items() if count > 1):
        yield f"expected one section {name}, found {counts[name]}"


def _is_usual(section: elf.Section) -> bool:
    """Whether a section is loaded, or one of those that linkers leave in a file."""
    if not section.kind or section.flags & _ALLOCATED or section.name in _OF_NAMES:
        return True
    return _UNLOADED.fullmatch(section.name) is not None and section.size <= _UNLOADED_BYTES


def _hidden(library: Library) -> Iterator[str]:
    """No bytes beside sections and headers, and no device code outside of its sections."""
    file = library.file
    if file.unclaimed is not None:
        yield (
            "expected zeros outside of sections and headers, found data at byte "
            f"{file.unclaimed} of {len(file.data)}"
        )
    device = [
        (one.offset, one.offset + len(one.content))
        for name in fatbin.SECTIONS
        for one in file.named(name)
    ]
    for what, places in device_code.FORMS.items():
        for at in places(file.data):
            if not any(start <= at < stop for start, stop in device):
                yield f"expected {what} in {fatbin.SECTIONS[0]} alone, found it at byte {at}"
                break
