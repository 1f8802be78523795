"""Reads a cubin: its architecture and its kernels."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import elf

MACHINE: Final = 190  # EM_CUDA

_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_SYMTAB = 2
_FUNCTION = 2
_ENTRY_POINT = 0x10  # of st_other: a kernel, not a function that kernels call


class Function(NamedTuple):
    """A kernel, mangled, and the bytes of its code."""

    name: str
    size: int


class Cubin(NamedTuple):
    """What a cubin says of itself."""

    number: int  # 10 * major + minor of its compute capability
    functions: tuple[Function, ...]  # sorted


def read(data: memoryview, where: str) -> Cubin:
    """Read a cubin; BuildError when it is none."""
    file = elf.parse(data, where)
    if file.machine != MACHINE:
        raise BuildError(f"{where}: expected a cubin, found an ELF file for machine {file.machine}")
    try:
        # Toolkits before 13 write the lowest byte, and ABI 7.
        number = file.flags & 0xFF if file.abi_version < 8 else file.flags >> 8 & 0xFF
        return Cubin(number, tuple(sorted(_kernels(file))))
    except (struct.error, IndexError) as error:
        raise BuildError(f"{where}: expected a whole table of symbols in a cubin") from error


def _kernels(file: elf.Elf) -> Iterator[Function]:
    table = file.of_kind(_SYMTAB)
    if table is None:
        return
    strings = file.sections[table.link].content
    for name, info, other, _, _, size in _SYMBOL.iter_unpack(table.content):
        if info & 0xF == _FUNCTION and other & _ENTRY_POINT:
            yield Function(elf.text_at(strings, name), size)
