"""Reads what a shared library needs and exports: its dynamic section and symbols."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import elf, symbol_hash

MACHINES: Final = {62: "x86_64", 183: "aarch64"}
SHARED_OBJECT: Final = 3  # e_type

NEEDED, STRTAB, SYMTAB, STRSZ, SONAME, RPATH, TEXTREL, BIND_NOW = 1, 5, 6, 10, 14, 15, 22, 24
RUNPATH, FLAGS = 29, 30
VERSYM, FLAGS_1, VERNEED = 0x6FFFFFF0, 0x6FFFFFFB, 0x6FFFFFFE
FILTER, AUXILIARY, AUDIT, DEPAUDIT = 0x7FFFFFFF, 0x7FFFFFFD, 0x6FFFFEFC, 0x6FFFFEFB

_DYNAMIC, _DYNSYM, _VERNEED, _VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF  # kinds of sections
_TAGS: Final = 1 << 14  # ours has 40
_SECTIONS, _SEGMENTS = 1 << 10, 1 << 6  # ours have 30 and 10
_TAG = struct.Struct("<qQ")
_NEED = struct.Struct("<HHIII")  # version, entries, library, first entry, next
_NEED_VERSION = struct.Struct("<IHHII")  # hash, flags, index, name, next
_LOCAL, _WEAK = 0, 2  # bindings
_NOW, _NOW_1 = 8, 1  # of FLAGS and FLAGS_1
_PLAIN, _NUMBER = 1, 0x7FFF  # of a symbol's version: the only one of its name; its number


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
    soname: str | None
    needed: tuple[str, ...]
    run_paths: tuple[str, ...]
    tags: tuple[int, ...]  # the kinds of entries, in their order
    bind_now: bool  # all functions are resolved when the library is loaded
    symbols: tuple[elf.Symbol, ...]  # exported
    undefined: tuple[Undefined, ...]
    verneed: tuple[str, ...]  # the libraries whose versions of symbols it needs
    versioned: tuple[str, ...]  # what is exported otherwise than as the one version of its name

    @property
    def exported(self) -> tuple[str, ...]:
        """The names of what others find in it."""
        return tuple(sorted(symbol.name for symbol in self.symbols))


def read(file: elf.Elf, where: str) -> Dynamic:
    """Read a parsed file; BuildError when its tables are cut short."""
    try:
        return _read(file, where)
    except BuildError as error:
        raise BuildError(
            f"{where}: expected whole dynamic tables, found damaged ones: {error}"
        ) from None


def _read(file: elf.Elf, where: str) -> Dynamic:
    elf.limit(len(file.sections), "sections", where, _SECTIONS)
    elf.limit(len(file.segments), "segments", where, _SEGMENTS)
    rows, strings = tags(file)
    names, verneed = _needs(file)
    symbols, undefined, versioned = _symbols(file, names)

    def texts(*kinds: int) -> tuple[str, ...]:
        return tuple(elf.text_at(strings, value, where) for tag, value in rows if tag in kinds)

    flags, flags_1 = (sum(value for tag, value in rows if tag == one) for one in (FLAGS, FLAGS_1))
    kinds = tuple(tag for tag, _ in rows)
    return Dynamic(
        machine=MACHINES.get(file.machine, f"machine {file.machine}"),
        soname=next(iter(texts(SONAME)), None),
        needed=texts(NEEDED),
        run_paths=texts(RPATH, RUNPATH),
        tags=kinds,
        bind_now=bool(BIND_NOW in kinds or flags & _NOW or flags_1 & _NOW_1),
        symbols=symbols,
        undefined=undefined,
        verneed=verneed,
        versioned=versioned,
    )


def tags(file: elf.Elf) -> tuple[list[tuple[int, int]], bytes]:
    """The entries of the dynamic section up to its end, and their strings."""
    table = file.of_kind(_DYNAMIC)
    if table is None:
        return [], b""
    if len(table.content) % _TAG.size:
        raise _damaged(file.where)
    elf.limit(len(table.content) // _TAG.size, "entries in the dynamic section", file.where, _TAGS)
    rows = list(_TAG.iter_unpack(table.content))
    end = next((i for i, (tag, _) in enumerate(rows) if tag == 0), len(rows))
    if any(tag or value for tag, value in rows[end:]):  # a loader reads no further
        raise BuildError(f"{file.where}: expected zeros after the last entry, found others")
    return rows[:end], file.strings_of(table)


def _symbols(
    file: elf.Elf, names: Mapping[int, str]
) -> tuple[tuple[elf.Symbol, ...], tuple[Undefined, ...], tuple[str, ...]]:
    table = file.of_kind(_DYNSYM)
    if table is None:
        return (), (), ()
    versions = _versions(file)
    exported, undefined, versioned = [], [], []
    for index, symbol in enumerate(file.symbols(table)):
        if not symbol.name or symbol.binding == _LOCAL:
            continue
        version = versions[index] if index < len(versions) else _PLAIN
        if symbol.section == 0:
            name = names.get(version & _NUMBER)
            undefined.append(Undefined(symbol.name, symbol.binding == _WEAK, name))
        else:  # also what is hidden: loaders do not look at that
            exported.append(symbol)
            if version != _PLAIN:
                versioned.append(symbol.name)
    return tuple(exported), tuple(undefined), tuple(versioned)


def _versions(file: elf.Elf) -> list[int]:
    """The number of each symbol's version, in their order; with the bit of what is hidden."""
    table = file.of_kind(_VERSYM)
    if table is None:
        return []
    if len(table.content) % 2:
        raise _damaged(file.where)
    return [number for (number,) in struct.iter_unpack("<H", table.content)]


def _needs(file: elf.Elf) -> tuple[dict[int, str], tuple[str, ...]]:
    """The names of versions that are needed by their numbers, and whose they are."""
    needs = file.of_kind(_VERNEED)
    if needs is None:
        return {}, ()
    return _needed_versions(needs.content, file.strings_of(needs), file.where)


def _needed_versions(
    table: memoryview, strings: bytes, where: str
) -> tuple[dict[int, str], tuple[str, ...]]:
    """Names by number, and the libraries. Each entry lies behind the one before it: this ends."""
    names: dict[int, str] = {}
    asked = []
    position, step = 0, -1
    while step:
        if position + _NEED.size > len(table):
            raise _damaged(where)
        version, count, library, first, step = _NEED.unpack_from(table, position)
        if version != 1:
            raise _damaged(where)
        asked.append(elf.text_at(strings, library, where))
        entry = position + first
        for left in range(count, 0, -1):
            if entry + _NEED_VERSION.size > len(table) or len(names) > 0x8000:
                raise _damaged(where)
            digest, flags, index, name, following = _NEED_VERSION.unpack_from(table, entry)
            text = elf.text_at(strings, name, where)
            if index in names:
                raise BuildError(f"{where}: expected one version of number {index}, found two")
            if digest != symbol_hash.system_v(text):  # a loader compares it first
                raise BuildError(f"{where}: expected the hash of {text}, found {digest:#x}")
            if flags:  # a loader takes a library without such a version
                raise BuildError(f"{where}: expected {text} to be needed, found flags {flags:#x}")
            names[index] = text
            if left > 1 and following < _NEED_VERSION.size:
                raise _damaged(where)
            entry += following
        if step and step < _NEED.size:
            raise _damaged(where)
        position += step
    return names, tuple(asked)


def _damaged(where: str) -> BuildError:
    return BuildError(f"{where}: expected whole entries, found one cut short")
