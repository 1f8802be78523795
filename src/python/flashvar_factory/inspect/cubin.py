"""Reads a cubin: its architecture, its kernels with what each needs, the toolkit that made it."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import cubin_form, elf

T = TypeVar("T")

MACHINE: Final = 190  # EM_CUDA

_CUDA_13 = 8  # its version of the format; those before have 7
_NEW_WITH_12 = 100  # from 10.0 on, CUDA 12 has version 8 too
_SYMTAB = 2
_FUNCTION = 2
_ENTRY_POINT = 0x10  # of st_other: a kernel, not a function that kernels call
# Attributes of .nv.info: a format, a kind, and a value or the size of what follows.
_ATTRIBUTE = struct.Struct("<BBH")
_SIZED = 4  # the format whose value is a size
_BYTE, _WORD, _BYTES = 2, 3, 2  # the formats whose value is in the word itself
_FORMATS = (1, _BYTE, _WORD, _SIZED)  # nothing, a byte, a word, what follows
_MAX_THREADS, _THREADS, _FRAME, _STACK, _REGISTERS = 0x05, 0x10, 0x11, 0x12, 0x2F
_PARAMETERS, _PARAMETER_BYTES = 0x0A, 0x19  # their offset and bytes in constant memory; bytes
_PARAMETER = 0x17  # one of them: its offset, and its bytes above other bits
_OWN_SHARED_MEMORY = 49_152  # bytes: what code may have that a launch does not ask for
_EXITS, _BARRIERS, _API = 0x1C, 0x4C, 0x37  # where a kernel ends; barriers of a block; CUDA's
_MOST_BARRIERS = 16
_FIRST = struct.Struct("<I")
_BARRIERS_SHIFT = 20  # of sh_flags of code, in format 7
_RESERVED, _RESERVED_BYTES = ".nv.shared.reserved.0", 1024  # a part of each kernel's own
_PAIR = struct.Struct("<2I")  # symbol, value
_THREE = struct.Struct("<3I")
_NUMBER = struct.Struct("<IH6x")  # of a parameter: of one kind there is, and its own
_ONE, _BYTES_SHIFT = struct.Struct("<6xHI"), 18
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
    shared_memory: int = 0  # bytes that it has without a launch that asks for any


class Cubin(NamedTuple):
    """What a cubin states of itself."""

    number: int  # 10 * major + minor of its compute capability
    functions: tuple[Function, ...]  # sorted
    code: str | None = None  # passed to ptxas, e.g. "90a"; None where it left no note
    toolkit: str | None = None  # the version of ptxas
    stack: int | None = None  # bytes per thread: the most that any function takes
    abi: int = 8  # the version of the format
    api: int | None = None  # 10 * major + minor of the CUDA that it was made by, where it says so
    differences: tuple[str, ...] = ()  # from what ptxas writes

    @property
    def before_13(self) -> bool | None:
        """Whether it is in the format of CUDA 12 and before, which older drivers load.

        None for 10.0 and newer, for which CUDA 12 wrote the format of CUDA 13: their notes tell.
        """
        return None if self.number >= _NEW_WITH_12 else self.abi < _CUDA_13


def read(data: memoryview, where: str) -> Cubin:
    """Read a cubin; BuildError if it is not one."""
    file = elf.parse(data, where)
    if file.machine != MACHINE:
        raise BuildError(f"{where}: expected a cubin, found an ELF file for machine {file.machine}")
    if file.unclaimed is not None and elf.data_in(file.data, file.unclaimed) is not None:
        raise BuildError(
            f"{where}: expected a cubin of sections alone, found data at byte {file.unclaimed} of "
            f"{len(data)} that is in none"
        )
    if file.abi_version > _CUDA_13:
        raise BuildError(
            f"{where}: expected a cubin of format {_CUDA_13} or older, found {file.abi_version}; "
            "it is damaged, or of a newer toolkit than this audit knows"
        )
    # Format 7 has it in the lowest byte.
    number = file.flags & 0xFF if file.abi_version < _CUDA_13 else file.flags >> 8 & 0xFF
    note = b"".join(bytes(one.content) for one in file.named(_TOOL))
    version = _once(set(_VERSION.findall(note)), "version of ptxas", where)
    arch = _once(set(_ARCH.findall(note)), "architecture in the note of ptxas", where)
    if arch is not None and int(arch.rstrip(b"af")) != number:
        raise BuildError(
            f"{where}: expected a cubin for {arch.decode()}, as its note states, found one for "
            f"{number} by its flags"
        )
    registers, frames = _per_symbol(file)
    return Cubin(
        number,
        tuple(sorted(_kernels(file, registers), key=lambda one: one.name)),
        arch.decode() if arch is not None else None,
        version.decode() if version is not None else None,
        max(frames) if frames else None,
        file.abi_version,
        _api(file),
        (*cubin_form.differences(file, number, registers), *_parameters(file), *_limits(file)),
    )


def _kernels(file: elf.Elf, registers: Mapping[int, int]) -> Iterator[Function]:
    table = file.of_kind(_SYMTAB)
    if table is None:
        return
    threads: dict[str, int | None] = {}
    for one in file.sections:
        if one.name.startswith(".nv.info."):
            name, found = one.name.removeprefix(".nv.info."), _max_threads(one, file.where)
            _once({threads.setdefault(name, found), found}, "largest block", file.where)
            _require_parameters(name, one, file)
    for index, symbol in enumerate(file.symbols(table)):
        if symbol.kind == _FUNCTION and symbol.other & _ENTRY_POINT:
            _require_whole(symbol, file)
            yield Function(
                symbol.name,
                symbol.size,
                registers.get(index),
                threads.get(symbol.name),
                _own_memory(symbol.name, file),
            )


def _own_memory(name: str, file: elf.Elf) -> int:
    reserved = _RESERVED_BYTES if file.named(_RESERVED) else 0
    return max([0, *(one.size - reserved for one in file.named(f".nv.shared.{name}"))])


def _api(file: elf.Elf) -> int | None:
    """What every kernel was made by."""
    found = {
        bytes(value)
        for one in file.sections
        if one.name.startswith(".nv.info.")
        for kind, value in _attributes(one, file.where)
        if kind == _API
    }
    version = _once(found, "version of CUDA", file.where)
    return None if version is None else int.from_bytes(version, "little")


def _limits(file: elf.Elf) -> Iterator[str]:
    """Kernels that end outside of their code, or have no barriers that a block has."""
    for one in file.sections:
        if not one.name.startswith(".nv.info."):
            continue
        name = one.name.removeprefix(".nv.info.")
        code = file.named(f".text.{name}")
        rows = list(_attributes(one, file.where))
        stated = [bytes(value) for kind, value in rows if kind == _BARRIERS]
        if any(len(value) != _BYTES for value in stated):
            yield f"barriers in another format in {one.name}"
        barriers = [value[0] for value in stated if value]
        if file.abi_version < _CUDA_13:
            barriers += [each.flags >> _BARRIERS_SHIFT & 0xFF for each in code]
        if max(barriers, default=0) > _MOST_BARRIERS:
            yield f"{max(barriers)} barriers in {one.name}"
        size = max((len(each.content) for each in code), default=0)
        for kind, value in rows:
            if kind == _EXITS and any(
                place >= size for (place,) in _FIRST.iter_unpack(value[: len(value) // 4 * 4])
            ):
                yield f"an end of {name} behind its code"


def _require_whole(symbol: elf.Symbol, file: elf.Elf) -> None:
    """BuildError where a kernel is not the whole of its section, or takes more memory than any."""
    homes = file.named(f".text.{symbol.name}")
    if [(0, len(one.content)) for one in homes] != [(symbol.value, symbol.size)]:
        raise BuildError(
            f"{file.where}: expected {symbol.name} to be all of .text.{symbol.name}, found "
            f"{symbol.size:,} bytes at {symbol.value:#x}"
        )
    for one in file.named(f".nv.shared.{symbol.name}"):
        if one.size > _OWN_SHARED_MEMORY:
            raise BuildError(
                f"{file.where}: expected at most {_OWN_SHARED_MEMORY:,} bytes in {one.name}, found "
                f"{one.size:,}"
            )


def _require_parameters(name: str, section: elf.Section, file: elf.Elf) -> None:
    """BuildError where a kernel's parameters are not the end of its constant memory."""
    stated = dict(_attributes(section, file.where))
    place, size = stated.get(_PARAMETERS), stated.get(_PARAMETER_BYTES)
    memory = [one.size for one in file.named(f".nv.constant0.{name}")]
    if place is None or size is None or len(place) != _PAIR.size or not memory:
        return
    _, packed = _PAIR.unpack(place)
    begin, length = packed & 0xFFFF, packed >> 16
    found = int.from_bytes(size, "little")
    if length != found or memory != [begin + length]:
        raise BuildError(
            f"{file.where}: expected one number of bytes of {name}'s parameters, at the end of its "
            f"constant memory of {memory[0]}, found {length} at {begin}, and {found}"
        )


def _parameters(file: elf.Elf) -> Iterator[str]:
    """Kernels whose parameters do not end where all of them do: a launch copies each."""
    for one in file.sections:
        if not one.name.startswith(".nv.info."):
            continue
        rows = list(_attributes(one, file.where))
        numbers = [
            _NUMBER.unpack(v) for kind, v in rows if kind == _PARAMETER and len(v) == _NUMBER.size
        ]
        if sorted(numbers) != [(0, number) for number in range(len(numbers))]:
            yield f"parameters without a number each in {one.name}"
        ends = [
            place + (size >> _BYTES_SHIFT)
            for place, size in (
                _ONE.unpack(v) for kind, v in rows if kind == _PARAMETER and len(v) == _ONE.size
            )
        ]
        stated = [int.from_bytes(v, "little") for kind, v in rows if kind == _PARAMETER_BYTES]
        if ends and stated and max(ends) != stated[0]:
            yield f"parameters up to byte {max(ends)} of {stated[0]} in {one.name}"


def _per_symbol(file: elf.Elf) -> tuple[dict[int, int], list[int]]:
    """Registers by the index of a kernel's symbol, and the bytes of stack of all functions."""
    registers: dict[int, int] = {}
    functions: set[int] = set()
    frames: list[int] = []
    least: list[int] = []
    for section in file.named(".nv.info"):
        for kind, value in _attributes(section, file.where):
            if kind in (_REGISTERS, _FRAME, _STACK) and len(value) == _PAIR.size:
                symbol, amount = _PAIR.unpack(value)
                functions.add(symbol)
                if kind == _FRAME:
                    frames.append(amount)
                elif kind == _STACK:
                    least.append(amount)
                else:
                    found = registers.setdefault(symbol, amount)
                    _once({found, amount}, "number of registers of a kernel", file.where)
    table = file.of_kind(_SYMTAB)
    kinds = [one.kind for one in file.symbols(table)] if table is not None else []
    if any(index >= len(kinds) or kinds[index] != _FUNCTION for index in functions):
        raise BuildError(
            f"{file.where}: expected registers and stacks of functions in a cubin, found those of "
            "other symbols; it is damaged"
        )
    if least and frames and max(least) < max(frames):  # a driver makes room for this
        raise BuildError(
            f"{file.where}: expected a stack of {max(frames)} bytes or more in a cubin, as its "
            f"functions have, found one of {max(least)}"
        )
    return registers, frames


def _max_threads(section: elf.Section, where: str) -> int | None:
    sizes = {
        bytes(v) for kind, v in _attributes(section, where) if kind in (_MAX_THREADS, _THREADS)
    }
    size = _once(sizes, f"largest block in {section.name}", where)
    return math.prod(_THREE.unpack(size)) if size and len(size) == _THREE.size else None


def _once(found: Collection[T], what: str, where: str) -> T | None:
    """The one thing that is stated, None where nothing is; of two, readers take either."""
    if len(found) > 1:
        raise BuildError(f"{where}: expected one {what} in a cubin, found {len(found)} that differ")
    return next(iter(found), None)


def _attributes(section: elf.Section, where: str) -> Iterator[tuple[int, memoryview]]:
    """Kind and value of each attribute."""
    content, position, count = section.content, 0, 0
    while position < len(content):
        if position + _ATTRIBUTE.size > len(content):
            raise BuildError(f"{where}: expected whole attributes in {section.name}, found less")
        form, kind, size = _ATTRIBUTE.unpack_from(content, position)
        position += _ATTRIBUTE.size
        count += 1
        elf.limit(count, f"attributes in {section.name}", where)
        if form not in _FORMATS:
            raise BuildError(
                f"{where}: expected attributes of known formats in {section.name}, found {form}; "
                "it is damaged, or of a newer toolkit than this audit knows"
            )
        if form in (_BYTE, _WORD):
            yield kind, content[position - _BYTES : position]
        if form == _SIZED:
            if position + size > len(content):
                raise BuildError(
                    f"{where}: expected {size} bytes of an attribute in {section.name}, found less"
                )
            yield kind, content[position : position + size]
            position += size
