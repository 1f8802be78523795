"""Reads a cubin: its architecture, its kernels with what each needs, the toolkit that made it."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import elf

MACHINE: Final = 190  # EM_CUDA

_CUDA_13 = 8  # its version of the format; those before have 7
_SYMTAB = 2
_FUNCTION = 2
_ENTRY_POINT = 0x10  # of st_other: a kernel, not a function that kernels call
# Attributes of .nv.info: a format, a kind, and a value or the size of what follows.
_ATTRIBUTE = struct.Struct("<BBH")
_SIZED = 4  # the format whose value is a size
_MAX_THREADS, _FRAME, _REGISTERS = 0x05, 0x11, 0x2F
_PAIR = struct.Struct("<2I")  # symbol, value
_THREE = struct.Struct("<3I")
# What ptxas writes of itself: its version, and how it was called.
_TOOL = ".note.nv.tkinfo"
_VERSION = re.compile(rb"release \d+\.\d+, V(?P<version>\d+\.\d+\.\d+)\0")
_ARCH = re.compile(rb"-arch sm_(?P<code>[0-9]+[af]?)[ \0]")


class Function(NamedTuple):
    """A kernel, and what a launch of it takes."""

    name: str  # mangled
    size: int  # bytes of code
    registers: int | None = None  # per thread; None where the cubin does not say
    threads: int | None = None  # of the largest block


class Cubin(NamedTuple):
    """What a cubin states of itself."""

    number: int  # 10 * major + minor of its compute capability
    functions: tuple[Function, ...]  # sorted
    code: str | None = None  # what ptxas was told, e.g. "90a"; None where it left no note
    toolkit: str | None = None  # the version of ptxas
    stack: int | None = None  # bytes per thread: the most that any function takes
    abi: int = 8  # the version of the format

    @property
    def before_13(self) -> bool:
        """Whether it is in the format of CUDA 12 and before, which older drivers load."""
        return self.abi < _CUDA_13


def read(data: memoryview, where: str) -> Cubin:
    """Read a cubin; BuildError when it is none."""
    file = elf.parse(data, where)
    if file.machine != MACHINE:
        raise BuildError(f"{where}: expected a cubin, found an ELF file for machine {file.machine}")
    if file.unclaimed is not None and any(file.data[file.unclaimed :]):
        raise BuildError(
            f"{where}: expected a cubin of sections alone, found data at byte {file.unclaimed} of "
            f"{len(data)} that is in none"
        )
    # Toolkits before 13 write the lowest byte.
    before_13 = file.abi_version < _CUDA_13
    number = file.flags & 0xFF if before_13 else file.flags >> 8 & 0xFF
    note = b"".join(bytes(one.content) for one in file.named(_TOOL))
    version, arch = _VERSION.search(note), _ARCH.search(note)
    registers, frames = _per_symbol(file)
    return Cubin(
        number,
        tuple(sorted(_kernels(file, registers), key=lambda one: one.name)),
        arch["code"].decode() if arch else None,
        version["version"].decode() if version else None,
        max(frames) if frames else None,
        file.abi_version,
    )


def _kernels(file: elf.Elf, registers: Mapping[int, int]) -> Iterator[Function]:
    table = file.of_kind(_SYMTAB)
    if table is None:
        return
    threads = {
        one.name.removeprefix(".nv.info."): _max_threads(one, file.where)
        for one in file.sections
        if one.name.startswith(".nv.info.")
    }
    for index, symbol in enumerate(file.symbols(table)):
        if symbol.kind == _FUNCTION and symbol.other & _ENTRY_POINT:
            yield Function(
                symbol.name,
                symbol.size,
                registers.get(index),
                threads.get(symbol.name),
            )


def _per_symbol(file: elf.Elf) -> tuple[dict[int, int], list[int]]:
    """Registers by the index of a kernel's symbol, and the bytes of stack of all functions."""
    registers: dict[int, int] = {}
    frames: list[int] = []
    for section in file.named(".nv.info"):
        for kind, value in _attributes(section, file.where):
            if kind in (_REGISTERS, _FRAME) and len(value) == _PAIR.size:
                symbol, amount = _PAIR.unpack(value)
                if kind == _REGISTERS:
                    registers[symbol] = amount
                else:
                    frames.append(amount)
    return registers, frames


def _max_threads(section: elf.Section, where: str) -> int | None:
    sizes = [v for kind, v in _attributes(section, where) if kind == _MAX_THREADS]
    return math.prod(_THREE.unpack(sizes[0])) if sizes and len(sizes[0]) == _THREE.size else None


def _attributes(section: elf.Section, where: str) -> Iterator[tuple[int, memoryview]]:
    """Kind and value of each attribute."""
    content, position = section.content, 0
    while position < len(content):
        if position + _ATTRIBUTE.size > len(content):
            raise BuildError(f"{where}: expected whole attributes in {section.name}, found less")
        form, kind, size = _ATTRIBUTE.unpack_from(content, position)
        position += _ATTRIBUTE.size
        if form == _SIZED:
            if position + size > len(content):
                raise BuildError(
                    f"{where}: expected {size} bytes of an attribute in {section.name}, found less"
                )
            yield kind, content[position : position + size]
            position += size
