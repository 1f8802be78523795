"""Checks what a loader writes into a library before anything of it runs, and what runs first."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import dynamic, elf, fatbin, unwinding

_RELOCATION = struct.Struct("<QIIq")  # address, kind, symbol, addend
_TABLES, _DYNSYM, _SYMBOL_BYTES = 4, 11, 24
_WORD = 8
_MOST = 1 << 18  # ours has 2,000
# Kinds by processor: that of addresses within the library, and all. None runs code (IRELATIVE) or
# copies data of another library (COPY).
_RELATIVE = {"x86_64": 8, "aarch64": 1027}
_KINDS = {"x86_64": (1, 6, 7, 8, 16, 17, 18), "aarch64": (257, *range(1025, 1032))}
# Those of functions that are called, and of variables of threads; kinds of symbols that they take.
_CALLED = {"x86_64": (7,), "aarch64": (1026,)}
_THREADS = {"x86_64": (16, 17, 18), "aarch64": (1028, 1029, 1030, 1031)}
_ANY, _DATA, _FUNCTION, _VARIABLE = 0, 1, 2, 6
_TLS = 7  # kind of segment
_BEGINNING, _END, _PACKED = 14, 15, 19  # kinds of sections: INIT_ARRAY, FINI_ARRAY, RELR
_RELATIVES = 0x6FFFFFF9  # RELACOUNT
# What host code hands to the CUDA runtime for each container: magic, version, where it is, unused.
_WRAPPERS, _WRAPPER, _MAGIC = ".nvFatBinSegment", 24, b"\xb1\x43\x62\x46\1\0\0\0"


class Relocation(NamedTuple):
    """One word that a loader writes."""

    place: int
    kind: int
    symbol: int
    added: int


def relocations(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """Relocations write data only, each word once, and functions point to code of the library."""
    del expected
    for library in wheel.libraries:
        for message in _found(library):
            yield Finding("relocations", library.path, message)


def _found(library: Library) -> Iterator[str]:
    file = library.file
    tables = [one for one in file.sections if one.kind == _TABLES and one.allocated]
    for one in tables:
        if len(one.content) % _RELOCATION.size:
            yield f"expected whole relocations in {one.name}, found one cut short"
            return
        if len(one.content) > _MOST * _RELOCATION.size:
            yield f"expected at most {_MOST:,} relocations in {one.name}, found more"
            return
    rows = [Relocation(*row) for one in tables for row in _RELOCATION.iter_unpack(one.content)]
    relative = _RELATIVE.get(library.dynamic.machine, 0)
    packed = list(islice(_packed(file, relative), _MOST + 1))
    if len(packed) > _MOST:
        yield f"expected at most {_MOST:,} packed relocations, found more"
        return
    yield from _words(library, [*rows, *packed], relative)
    at = {row.place: row for row in (*rows, *packed) if row.kind == relative}
    yield from _symbols(library, rows)
    yield from _functions(file, at)
    yield from _beginnings(file, at)
    yield from _wrappers(file, at, {row.place for row in rows})
    stated = [value for tag, value in dynamic.tags(file)[0] if tag == _RELATIVES]
    first = next((i for i, row in enumerate(rows) if row.kind != relative), len(rows))
    if stated and stated != [first]:
        yield (
            f"expected DT_RELACOUNT to be {first}, the relative relocations at the beginning, "
            f"found {stated[0]}: a loader takes as many for relative"
        )


def _packed(file: elf.Elf, relative: int) -> Iterator[Relocation]:
    """The relative relocations that a linker packed (RELR): what is added is in the data."""
    for section in (one for one in file.sections if one.kind == _PACKED and one.allocated):
        whole = section.content[: len(section.content) // _WORD * _WORD]
        for place in _places(whole):
            data = file.at_address(place, _WORD)
            added = -1 if data is None else int.from_bytes(data, "little")
            yield Relocation(place, relative, 0, added)


def _places(table: memoryview) -> Iterator[int]:
    following = 0
    for (word,) in struct.iter_unpack("<Q", table):
        if word & 1:  # a bit for each of the following words
            yield from (following + _WORD * i for i in range(63) if word >> i + 1 & 1)
            following += 63 * _WORD
        else:
            yield word
            following = word + _WORD


def _words(library: Library, rows: list[Relocation], relative: int) -> Iterator[str]:
    file, kinds = library.file, _KINDS.get(library.dynamic.machine, ())
    table = file.of_kind(_DYNSYM)
    count = len(table.content) // _SYMBOL_BYTES if table is not None else 0
    parts = [one for one in file.segments if one.kind == elf.LOAD]
    memory = [(one.address, one.address + one.memory_size) for one in parts]
    data = [(one.address, one.address + one.memory_size) for one in parts if one.flags & elf.WRITE]
    for row in rows:
        if row.symbol >= count:
            wanted = "known symbols"
        elif not _inside(row.place, _WORD, data):
            wanted = "writable data"
        elif row.kind not in kinds:
            wanted = "known kinds"
        elif row.kind == relative and (row.symbol or not _inside(row.added, 0, memory)):
            wanted = "addresses of the library"
        else:
            continue
        yield f"expected relocations of {wanted}, found another at {row.place:#x}"
        return
    twice = [place for place, number in Counter(row.place for row in rows).items() if number > 1]
    if twice:
        yield f"expected each word to be relocated once, found two for {twice[0]:#x}"


def _symbols(library: Library, rows: list[Relocation]) -> Iterator[str]:
    """A word that is no address of the library is that of one symbol, of the kind it is used as."""
    file, machine = library.file, library.dynamic.machine
    table = file.of_kind(_DYNSYM)
    symbols = list(file.symbols(table)) if table is not None else []
    memory = sum(one.memory_size for one in file.segments if one.kind == _TLS)
    called: Counter[int] = Counter()
    for row in rows:
        if row.symbol >= len(symbols) or row.kind == _RELATIVE.get(machine):
            continue
        kind = symbols[row.symbol].kind
        if row.kind in _THREADS.get(machine, ()):
            wanted = "a variable of threads"
            right = kind == _VARIABLE or (not row.symbol and 0 <= row.added <= memory)
        elif row.kind in _CALLED.get(machine, ()):
            wanted = "a named function"
            right = bool(row.symbol) and not row.added and kind in (_ANY, _FUNCTION)
            called[row.symbol] += 1
        else:
            wanted = "a name"
            right = bool(row.symbol) and not row.added and kind in (_ANY, _DATA, _FUNCTION)
        if not right:
            yield (
                f"expected a relocation of {wanted} at {row.place:#x}, found one of symbol "
                f"{row.symbol} ({symbols[row.symbol].name or 'none'}) and {row.added} bytes"
            )
            return
    for index, count in called.items():
        if count > 1:
            yield f"expected one slot for calls of {symbols[index].name}, found {count}"


def _functions(file: elf.Elf, at: Mapping[int, Relocation]) -> Iterator[str]:
    """What runs when the library is opened and closed is its code."""
    code = [(it.address, it.address + it.size) for it in file.sections if it.name == ".text"]
    for section in (one for one in file.sections if one.kind in (_BEGINNING, _END)):
        called: set[int] = set()
        for place in range(section.address, section.address + section.size, _WORD):
            found = at.get(place)
            if found is None or not _inside(found.added, 1, code):
                shown = "nothing" if found is None else f"{found.added:#x}"
                yield f"expected functions of .text in {section.name}, found {shown}"
                break
            if found.added in called:
                yield f"expected each function once in {section.name}, found {found.added:#x} twice"
                break
            called.add(found.added)


def _beginnings(file: elf.Elf, at: Mapping[int, Relocation]) -> Iterator[str]:
    """Addresses of code are where functions begin, as far as a table lists these."""
    try:
        sizes = unwinding.functions(file)
    except BuildError:
        return  # another check reports it
    starts = list(sizes)
    for place, row in at.items():
        within = unwinding.around(row.added, sizes, starts)
        if within is not None and within[0] != row.added:
            yield (
                f"expected the address of a function's beginning at {place:#x}, found "
                f"{row.added:#x}, within the one at {within[0]:#x}"
            )
            return


def _wrappers(
    file: elf.Elf, at: Mapping[int, Relocation], places: Collection[int]
) -> Iterator[str]:
    """Each container of device code is registered, and nothing else is."""
    containers = [
        one.address + place
        for name in fatbin.SECTIONS
        for one in file.named(name)
        for place in fatbin.places(one.content, file.where)
    ]
    found = []
    for section in file.named(_WRAPPERS):
        for start in range(0, len(section.content), _WRAPPER):
            row = at.get(section.address + start + _WORD)
            found.append(-1 if row is None else row.added)
            unused = section.content[start + 2 * _WORD : start + _WRAPPER]
            if (
                bytes(section.content[start : start + _WORD]) != _MAGIC
                or any(unused)
                or section.address + start + 2 * _WORD in places
            ):
                yield f"expected the wrapper of a container at {start} of {_WRAPPERS}, found none"
                return
    # What relocates nothing has no host code, which registers device code.
    if sorted(found) != containers and (file.named(_WRAPPERS) or at):
        yield (
            f"expected one wrapper in {_WRAPPERS} for each of {len(containers)} containers of "
            f"device code, found {len(found)}, or others"
        )
    elif found != sorted(found) and not file.named(fatbin.SECTIONS[1]):
        # An object file has one of each, and asks its own container for its functions.
        yield f"expected wrappers in {_WRAPPERS} in the order of their containers, found another"


def _inside(start: int, size: int, ranges: list[tuple[int, int]]) -> bool:
    return any(first <= start and start + size <= end for first, end in ranges)
