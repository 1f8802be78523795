"""Reads what a shared library needs and exports: its dynamic section and symbols."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import elf

MACHINES: Final = {62: "x86_64", 183: "aarch64"}

_DYNAMIC, _DYNSYM, _VERNEED, _VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF  # kinds of sections
_NEEDED, _RPATH, _RUNPATH = 1, 15, 29  # tags of the dynamic section
_TAG = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_NEED = struct.Struct("<HHIII")  # version, entries, library, first entry, next
_NEED_VERSION = struct.Struct("<IHHII")  # hash, flags, index, name, next
_LOCAL, _WEAK = 0, 2  # bindings
_INTERNAL, _HIDDEN = 1, 2  # visibilities


@dataclass(frozen=True)
class Undefined:
    """A symbol that another library has to bring."""

    name: str
    weak: bool  # may be missing
    version: str | None  # "GLIBC_2.14"


@dataclass(frozen=True)
class Dynamic:
    """All of it."""

    machine: str  # "x86_64"
    needed: tuple[str, ...]
    run_paths: tuple[str, ...]
    exported: tuple[str, ...]
    undefined: tuple[Undefined, ...]


def read(file: elf.Elf, where: str) -> Dynamic:
    """Read a parsed file; BuildError when its tables are cut short."""
    try:
        needed, run_paths = _tags(file)
        exported, undefined = _symbols(file)
    except (struct.error, IndexError) as error:
        raise BuildError(f"{where}: expected whole dynamic tables, found damaged ones") from error
    machine = MACHINES.get(file.machine, f"machine {file.machine}")
    return Dynamic(machine, needed, run_paths, exported, undefined)


def _tags(file: elf.Elf) -> tuple[tuple[str, ...], tuple[str, ...]]:
    table = file.of_kind(_DYNAMIC)
    if table is None:
        return (), ()
    strings = file.sections[table.link].content
    rows = list(_TAG.iter_unpack(table.content))
    needed = tuple(elf.text_at(strings, value) for tag, value in rows if tag == _NEEDED)
    paths = tuple(elf.text_at(strings, value) for tag, value in rows if tag in (_RPATH, _RUNPATH))
    return needed, paths


def _symbols(file: elf.Elf) -> tuple[tuple[str, ...], tuple[Undefined, ...]]:
    table = file.of_kind(_DYNSYM)
    if table is None:
        return (), ()
    strings = file.sections[table.link].content
    versions = _versions(file)
    exported, undefined = [], []
    for index, row in enumerate(_SYMBOL.iter_unpack(table.content)):
        offset, info, other, section = row[:4]
        binding = info >> 4
        if offset == 0 or binding == _LOCAL:
            continue
        name = elf.text_at(strings, offset)
        if section == 0:
            undefined.append(Undefined(name, binding == _WEAK, versions.get(index)))
        elif other & 3 not in (_INTERNAL, _HIDDEN):
            exported.append(name)
    return tuple(sorted(exported)), tuple(undefined)


def _versions(file: elf.Elf) -> dict[int, str]:
    """Which version of it each symbol asks for, by the symbol's index."""
    table, needs = file.of_kind(_VERSYM), file.of_kind(_VERNEED)
    if table is None or needs is None:
        return {}
    names = _needed_versions(needs.content, file.sections[needs.link].content)
    indices = (number & 0x7FFF for (number,) in struct.iter_unpack("<H", table.content))
    return {i: names[number] for i, number in enumerate(indices) if number in names}


def _needed_versions(table: memoryview, strings: memoryview) -> dict[int, str]:
    names: dict[int, str] = {}
    position, step = 0, -1
    while step:
        _, count, _, first, step = _NEED.unpack_from(table, position)
        entry = position + first
        for _ in range(count):
            _, _, index, name, following = _NEED_VERSION.unpack_from(table, entry)
            names[index] = elf.text_at(strings, name)
            entry += following
        position += step
    return names
