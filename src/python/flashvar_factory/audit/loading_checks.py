"""Checks how a library is loaded: segments, dynamic section, and that no byte of it is hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.inspect import dynamic, elf, fatbin
from flashvar_factory.inspect.cubin import MACHINE as CUDA

# What a linker writes into a library of ours. Other entries make a loader look for other libraries
# (auxiliary, filter, audit), write into code (TEXTREL), or are of other systems.
_TAGS = frozenset(
    {
        *range(1, 15),  # NEEDED to SONAME
        *(17, 18, 19, 20, 21, 23, 24, 25, 26, 27, 28, 30, 35, 36, 37),
        *(0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFF9, 0x6FFFFFFA, 0x6FFFFFFB, 0x6FFFFFFE, 0x6FFFFFFF),
        *(0x70000001, 0x70000003, 0x70000005),  # of aarch64: BTI, PAC, calling conventions
    }
)
_REPORTED = frozenset({dynamic.RPATH, dynamic.RUNPATH})  # by `dependencies`
_ADDRESSES = {".dynstr": dynamic.STRTAB, ".dynsym": dynamic.SYMTAB}
_INTERPRETER = 3
_EXECUTABLE = 4  # of sh_flags
_FUNCTION, _GLOBAL = 2, (1, 2)
_TEXT_OF_PTX = re.compile(rb"\.version\s+\d+\.\d+\s+\.target\s+(?:sm|compute)_")
_CUDA_ELF = re.compile(
    re.escape(elf.MAGIC) + rb".{12}" + re.escape(CUDA.to_bytes(2, "little")), re.DOTALL
)


def loading(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """A library of ours is loaded as its sections say, read-only where it can be."""
    del expected
    for library in wheel.libraries:
        for message in (
            *_segments(library),
            *_dynamic(library),
            *_sections(library),
            *_hidden(library),
        ):
            yield Finding("loading", library.path, message)


def _segments(library: Library) -> Iterator[str]:
    file = library.file
    if file.kind != dynamic.SHARED_OBJECT:
        yield f"expected a shared library, found an ELF file of type {file.kind}"
    stacks = [one for one in file.segments if one.kind == elf.GNU_STACK]
    if len(stacks) != 1 or stacks[0].flags & elf.EXECUTE:
        yield "expected a stack that is not executable, found another; link with -z noexecstack"
    for one in file.segments:
        if one.kind == elf.LOAD and one.flags & elf.WRITE and one.flags & elf.EXECUTE:
            yield f"expected code that cannot be written to, found a segment at {one.address:#x}"
        if one.kind == elf.LOAD and one.memory_size < one.file_size:
            yield f"expected room for the segment at {one.address:#x}, found less than its bytes"
        if one.kind == _INTERPRETER:
            yield "expected a library, found a program: it names an interpreter"
    if not any(one.kind == elf.GNU_RELRO for one in file.segments) or not library.dynamic.bind_now:
        yield (
            "expected relocations that are read-only once it is loaded (RELRO and BIND_NOW), found "
            "others; link with -z relro -z now"
        )


def _dynamic(library: Library) -> Iterator[str]:
    file, found = library.file, library.dynamic
    name = library.path.rpartition("/")[2]
    if found.soname != name:
        yield f"expected the SONAME {name}, found {found.soname}"
    for tag in sorted(set(found.tags) - _TAGS - _REPORTED):
        yield f"expected the usual entries in its dynamic section, found {tag:#x}"
    sections = [one for one in file.sections if one.name == ".dynamic"]
    segments = [one for one in file.segments if one.kind == elf.DYNAMIC]
    if [(one.offset, one.address, one.size) for one in sections] != [
        (one.offset, one.address, one.file_size) for one in segments
    ]:
        yield "expected one dynamic section where its segment is, found them apart"
    rows, _ = dynamic.tags(file)
    for section, tag in _ADDRESSES.items():
        wanted = [one.address for one in file.named(section)]
        if [value for kind, value in rows if kind == tag] != wanted:
            yield f"expected {section} where the loader looks for it, found it elsewhere"
    lengths = [len(one.content) for one in file.named(".dynstr")]
    if [value for kind, value in rows if kind == dynamic.STRSZ] != lengths:
        yield "expected .dynstr as long as the loader takes it, found another length"
    for symbol in found.symbols:
        home = file.sections[symbol.section] if symbol.section < len(file.sections) else None
        executable = home is not None and home.flags & _EXECUTABLE
        if symbol.kind != _FUNCTION or symbol.binding not in _GLOBAL or not executable:
            yield f"expected {symbol.name} to be a function in code, found something else"


def _sections(library: Library) -> Iterator[str]:
    """Sections are what an auditor reads, segments what a loader does: they are the same bytes."""
    file = library.file
    for one in file.sections:
        if one.allocated and one.size and file.at_address(one.address, one.size) != one.content:
            yield f"expected the section {one.name} in a segment at its address, found it elsewhere"
    names = [one.name for one in file.sections]
    for name in sorted({name for name in names if name and names.count(name) > 1}):
        yield f"expected one section {name}, found {names.count(name)}"


def _hidden(library: Library) -> Iterator[str]:
    """No bytes beside sections and headers, and no device code outside of its sections."""
    file = library.file
    contents = ((one.offset, one.offset + len(one.content)) for one in file.sections if one.content)
    end = 0
    for start, stop in sorted([*file.tables, *contents]):
        if start > end and any(file.data[end:start]):
            yield f"expected zeros between its parts, found data at byte {end}"
        end = max(end, stop)
    if end < len(file.data):
        yield f"expected nothing behind its last part, found {len(file.data) - end} bytes"
    device = [
        (one.offset, one.offset + len(one.content))
        for name in fatbin.SECTIONS
        for one in file.named(name)
    ]
    for what, pattern in (
        ("PTX", _TEXT_OF_PTX),
        ("device code", re.compile(re.escape(fatbin.START))),
        ("a cubin", _CUDA_ELF),
    ):
        places = [match.start() for match in pattern.finditer(file.data)]
        outside = [at for at in places if not any(start <= at < stop for start, stop in device)]
        if outside:
            yield f"expected {what} in {fatbin.SECTIONS[0]} alone, found some at byte {outside[0]}"
