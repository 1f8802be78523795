"""Reads the hash tables of a library, by which a loader finds the symbols that it exports."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import elf

GNU, SYSTEM_V = 0x6FFFFFF6, 5  # kinds of sections

_HEADER = struct.Struct("<4I")  # buckets, first symbol, words of the filter, shift
_OLDER = struct.Struct("<2I")  # buckets, symbols
_WORD: Final = 64  # bits of the filter's words
_LAST: Final = 1  # of a hash: the last of its bucket


def found(section: elf.Section, names: Sequence[str], where: str) -> list[str]:
    """What a loader finds by a GNU hash table; `names` are those of all symbols, in their order.

    BuildError when the table is cut short, or leads to no symbol.
    """
    table = section.content
    if len(table) < _HEADER.size:
        raise _damaged(where)
    count, first, words, shift = _HEADER.unpack_from(table)
    start = _HEADER.size + words * 8
    chains = start + count * 4
    if chains > len(table) or (len(table) - chains) % 4 or not words or not count:
        raise _damaged(where)
    filters = struct.unpack_from(f"<{words}Q", table, _HEADER.size)
    buckets = struct.unpack_from(f"<{count}I", table, start)
    hashes = [number for (number,) in struct.iter_unpack("<I", table[chains:])]
    if len(hashes) != max(len(names) - first, 0):
        raise _damaged(where)
    reached = []
    for bucket, index in enumerate(buckets):
        while index:
            if not first <= index < len(names):
                raise _damaged(where)
            held, name = hashes[index - first], names[index]
            number = gnu(name)
            word = filters[number // _WORD % words]
            passed = word >> number % _WORD & word >> (number >> shift) % _WORD & 1
            if number | _LAST == held | _LAST and number % count == bucket and passed:
                reached.append(name)
            index = 0 if held & _LAST else index + 1
        if len(reached) > len(names):  # buckets that lead into one another
            raise _damaged(where)
    return reached


def found_by_older(section: elf.Section, names: Sequence[str], where: str) -> list[str]:
    """The same by a table of the older kind, which leads to what is asked for too."""
    table = section.content
    if len(table) < _OLDER.size:
        raise _damaged(where)
    count, chained = _OLDER.unpack_from(table)
    if not count or chained != len(names) or len(table) != _OLDER.size + 4 * (count + chained):
        raise _damaged(where)
    buckets = struct.unpack_from(f"<{count}I", table, _OLDER.size)
    chains = struct.unpack_from(f"<{chained}I", table, _OLDER.size + 4 * count)
    reached: list[str] = []
    for bucket, index in enumerate(buckets):
        while index:
            if index >= chained or len(reached) > chained:  # chains that lead into one another
                raise _damaged(where)
            if system_v(names[index]) % count == bucket:
                reached.append(names[index])
            index = chains[index]
    return reached


def system_v(name: str) -> int:
    """The older hash, which names of versions have."""
    number = 0
    for byte in name.encode():
        number = (number << 4) + byte
        number = (number ^ (number & 0xF0000000) >> 24) & 0x0FFFFFFF
    return number


def gnu(name: str) -> int:
    """The hash of a name."""
    number = 5381
    for byte in name.encode():
        number = (number * 33 + byte) & 0xFFFFFFFF
    return number


def _damaged(where: str) -> BuildError:
    return BuildError(f"{where}: expected a hash table of the symbols that are there, found none")
