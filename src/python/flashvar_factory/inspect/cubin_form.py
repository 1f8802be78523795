"""Tells where a cubin has another form than ptxas gives it: in what a driver reads."""

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
    r"|\.(?:(?:sh)?strtab|symtab(?:_shndx)?|(?:note\.)?nv\..+|text\..+|debug_frame"
    r"|rela?\.(?:nv\.|text\.|debug_frame).*)"
)
_DEBUGGING: Final = re.compile(r"\.debug_(?!frame\b)|\.nv_debug|\.rela?\.debug_(?!frame\b)")


def differences(file: elf.Elf, number: int, registers: Mapping[int, int]) -> Iterator[str]:
    """What differs, for a cubin for `number` with these registers by the index of a symbol."""
    yield from _header(file, number)
    symbols = {index: one for index, one in enumerate(_symbols(file)) if one.other & 0x10}
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
        if _DEBUGGING.match(one.name):
            yield f"debug information, {one.name}"
        elif _SECTIONS.fullmatch(one.name) is None:
            yield f"a section of no use to drivers, {one.name}"


def _header(file: elf.Elf, number: int) -> Iterator[str]:
    if file.abi_version not in _HEADERS:
        return  # of a toolkit that no wheel of a factory is made with: its version is judged
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


def _symbols(file: elf.Elf) -> Iterator[elf.Symbol]:
    table = file.of_kind(2)
    return iter(()) if table is None else file.symbols(table)
