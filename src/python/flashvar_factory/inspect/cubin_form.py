"""Compares the parts of a cubin that drivers read with what ptxas writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from flashvar_factory.inspect import elf

_EXECUTABLE_FILE: Final = 2  # e_type
# By the version of the format: whose ABI it is, and the version of the ELF file.
_HEADERS: Final = {7: (0x33, 0x81), 8: (0x41, 1)}
# The bits of e_flags beside the architecture: in format 7, and what "90a" adds; in format 8, below
# 10.0 and from it on.
_FLAGS_7, _SPECIFIC = 0x500, 0x800
_FLAGS_8, _OLD, _NEW, _NEW_FROM = 0x6000000, 4, 2, 100
_ACCESS, _CODE = 7, 6  # of sh_flags: of all, of code, which is loaded, read and executed
_TEXT: Final = ".text."
_SYMBOL_BITS: Final = 24  # of sh_info of code: the kernel's symbol; above it its registers
_STATES_REGISTERS: Final = 90  # below it, sh_info does so
_SECTIONS: Final = re.compile(
    r"|\.(?:(?:sh)?strtab|symtab(?:_shndx)?|(?:note\.)?nv\..+|nv_debug\.shared|text\..+|debug_frame"
    r"|rela?\.(?:nv\.|text\.|debug_frame).*)"
)
# The kinds of sections by the beginnings of their names, of which the first counts.
_KINDS: Final = (
    (".nv.info", (0x70000000,)),
    (".nv.constant", (1,)),
    (".nv.shared", (elf.NO_BITS, 0x7000000A)),
    (_TEXT, (1,)),
    (".note.", (7,)),
    (".rela.", (4,)),
    (".rel.", (9,)),
    (".symtab", (2, 0x12)),
    (".strtab", (3,)),
    (".shstrtab", (3,)),
)
_CONSTANTS: Final = ".nv.constant0."  # a driver puts a launch's parameters there
_ALIGNED: Final = 128  # code, in bytes
_HEADERS_PART: Final = 6  # kind of segment: the program headers
_READ: Final = 4  # of p_flags
_KERNEL: Final = 0x10  # of st_other
# What a driver has for kernels that print, assert and allocate; and names of ptxas.
_OF_DRIVERS: Final = re.compile(r"vprintf|__assertfail|malloc|free|\.nv\..+")
_DEBUGGING: Final = re.compile(
    r"\.debug_(?!frame\b)|\.nv_debug(?!\.shared$)|\.rela?\.debug_(?!frame\b)"
)


def differences(file: elf.Elf, number: int, registers: Mapping[int, int]) -> Iterator[str]:
    """What differs. `number`: the architecture; `registers`: of kernels, by index of the symbol."""
    yield from _header(file, number)
    yield from _parts(file)
    yield from _asked(file)
    symbols = {index: one for index, one in enumerate(_symbols(file)) if one.other & _KERNEL}
    for index, symbol in symbols.items():
        homes = file.numbers.get(f"{_TEXT}{symbol.name}", [])
        if [symbol.section] != homes:
            yield f"{symbol.name} elsewhere than in {_TEXT}{symbol.name}"
        for one in (file.sections[i] for i in homes):
            stated = one.info >> _SYMBOL_BITS
            wanted = registers.get(index, stated) if number < _STATES_REGISTERS else 0
            if (one.info & (1 << _SYMBOL_BITS) - 1, stated) != (index, wanted):
                yield f"{one.name} with another kernel or other registers in sh_info"
    for one in file.sections:
        if one.name.startswith(_TEXT) and one.flags & _ACCESS != _CODE:
            yield f"{one.name} that is not code by its flags, {one.flags:#x}"
        if one.name.startswith(_TEXT) and (one.address or one.alignment != _ALIGNED):
            yield f"{one.name} at {one.address:#x}, aligned to {one.alignment} bytes"
        kinds = next((right for name, right in _KINDS if one.name.startswith(name)), (one.kind,))
        if one.kind not in kinds:
            yield f"{one.name} as a section of kind {one.kind:#x}"
        if one.name.startswith(_CONSTANTS) and elf.data_in(one.content) is not None:
            yield f"data in {one.name}, which a driver writes"
        if _DEBUGGING.match(one.name):
            yield f"debug information, {one.name}"
        elif _SECTIONS.fullmatch(one.name) is None:
            yield f"a section of no use to drivers, {one.name}"


def _header(file: elf.Elf, number: int) -> Iterator[str]:
    if file.abi_version not in _HEADERS:
        return  # of a toolkit that no wheel of a factory is made with: its version is checked
    found = (file.system, file.version)
    if file.kind != _EXECUTABLE_FILE or found != _HEADERS[file.abi_version] or file.entry:
        yield (
            f"a header of type {file.kind}, OS ABI {file.system:#x}, version {file.version:#x} "
            f"and entry point {file.entry:#x}"
        )
    if file.abi_version == 8:
        low = _NEW if number >= _NEW_FROM else _OLD
        wanted = {_FLAGS_8 | number << 8 | low}
    else:
        plain = _FLAGS_7 | number << 16 | number
        wanted = {plain, plain | _SPECIFIC}
    if file.flags not in wanted:
        yield f"the flags {file.flags:#x} instead of {' or '.join(map(hex, sorted(wanted)))}"


def _parts(file: elf.Elf) -> Iterator[str]:
    """Parts that are not whole sections, or the headers of parts."""
    starts = {one.offset for one in file.sections}
    ends = {one.offset + len(one.content) for one in file.sections}
    zeros = sum(one.size + one.alignment for one in file.sections if not len(one.content))
    for one in file.segments:
        place = one.offset, one.offset + one.file_size
        whole = place in file.tables or (place[0] in starts and place[1] in ends)
        kept = one.flags & _READ and not (one.flags & elf.WRITE and one.flags & elf.EXECUTE)
        sized = one.file_size <= one.memory_size <= one.file_size + zeros
        if (
            one.kind not in (elf.LOAD, _HEADERS_PART)
            or one.address
            or not (whole and kept and sized)
        ):
            yield (
                f"a part of kind {one.kind:#x}, flags {one.flags:#x} and {one.memory_size:,} bytes "
                f"at {one.offset:#x}"
            )


def _asked(file: elf.Elf) -> Iterator[str]:
    """Names that are asked for, and that no driver has."""
    for index, one in enumerate(_symbols(file)):
        if index and not one.section and one.name and not _OF_DRIVERS.fullmatch(one.name):
            yield f"a symbol that is not in it, {one.name}"


def _symbols(file: elf.Elf) -> Iterator[elf.Symbol]:
    table = file.of_kind(2)
    return iter(()) if table is None else file.symbols(table)
