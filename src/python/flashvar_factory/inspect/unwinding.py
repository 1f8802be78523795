"""Reads the tables by which exceptions find their way: where each function of a library begins."""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import elf

# Version 1; the frames relative to here, their number, the rows relative to this table: all in 4
# bytes, as every linker writes it.
_HEADER: Final = struct.Struct("<4BiI")
_FORM: Final = (1, 0x1B, 0x03, 0x3B)
_ROW: Final = struct.Struct("<2i")  # a function, its frame
_FRAME: Final = struct.Struct("<IIiI")  # bytes, back to what is common, the function, its bytes
_POINTER: Final = 4  # where the header has the place of the frames
_BEGINNING: Final = 8  # where a frame has its function
_WORD: Final = struct.Struct("<I")
_PLACE: Final = struct.Struct("<i")
# What frames have in common: version 1; then what more they have, by letters, and alignments.
_COMMON: Final = re.compile(rb"\x01z(?P<letters>[PLRSB]*)\x00[\x01\x04][\x78\x7c].", re.DOTALL)
_LETTERS: Final = 12  # the longest text of them that is looked for
_HANDLERS: Final = ".gcc_except_table"
# How handlers are written: no other beginning; types by way of a table, or none; lengths as LEB128.
_HANDLER: Final = re.compile(rb"\xff(?:\xff|[\x00\x1b\x9b](?:[\x80-\xff]{0,4}[\x00-\x7f]))\x01")
_EXECUTABLE: Final = 4  # of sh_flags


class Frame(NamedTuple):
    """How a function is left by an exception."""

    place: int  # in .eh_frame
    start: int
    size: int
    handlers: int | None  # the address of its table of handlers


def functions(file: elf.Elf) -> dict[int, int]:
    """The size of each function by its address, in their order; none where there is no table.

    BuildError when the table does not lead to the frames, or they to other functions.
    """
    tables, frames = file.named(".eh_frame_hdr"), file.named(".eh_frame")
    if not tables:
        return {}
    table = tables[0]
    if len(table.content) < _HEADER.size or len(frames) != 1:
        raise _damaged(file.where)
    *form, place, count = _HEADER.unpack_from(table.content)
    rows = table.content[_HEADER.size :]
    if (
        tuple(form) != _FORM
        or table.address + _POINTER + place != frames[0].address
        or len(rows) != count * _ROW.size
    ):
        raise _damaged(file.where)
    try:
        held = {frame.place: frame for frame in _frames(frames[0])}
    except (IndexError, struct.error, ValueError):
        raise _damaged(file.where) from None
    if len(held) != count:
        raise _damaged(file.where)
    found: dict[int, int] = {}
    end = 0
    for function, at in _ROW.iter_unpack(rows):
        start = table.address + function
        frame = held.get(table.address + at - frames[0].address)
        if frame is None or frame.start != start or start < end:
            raise _damaged(file.where)
        found[start] = frame.size
        end = start + max(frame.size, 1)
    _require_code(file, found)
    _require_handlers(file, [one.handlers for one in held.values() if one.handlers])
    return found


def around(address: int, sizes: Mapping[int, int], starts: Sequence[int]) -> tuple[int, int] | None:
    """The function that an address is of; None where no table says that it is of one."""
    before = bisect_right(starts, address) - 1
    if before < 0 or address >= starts[before] + max(sizes[starts[before]], 1):
        return None
    return starts[before], sizes[starts[before]]


def _frames(section: elf.Section) -> Iterator[Frame]:
    """Every frame, up to the zeros at the end.

    IndexError, ValueError or struct.error where one is damaged.
    """
    content, position = section.content, 0
    handled: dict[int, bool] = {}  # whether the frames of a common part have handlers
    while True:
        (size,) = _WORD.unpack_from(content, position)
        if not size:
            break
        start, position = position, position + _WORD.size + size
        back, *_ = _WORD.unpack_from(content, start + _WORD.size)
        if position > len(content):
            raise ValueError("cut short")
        if not back:
            handled[start] = _has_handlers(content[start + 2 * _WORD.size : position])
            continue
        common = start + _WORD.size - back
        if common not in handled:
            raise ValueError("a frame without its common part")
        *_, begins, length = _FRAME.unpack_from(content, start)
        address = section.address + start
        handlers = None
        if handled[common]:  # behind the byte that says how much more there is
            at = start + _FRAME.size + 1
            (relative,) = _PLACE.unpack_from(content, at)
            handlers = section.address + at + relative if relative else None
        yield Frame(start, address + _BEGINNING + begins, length, handlers)
    if any(content[position:]):
        raise ValueError("data behind the end")


def _has_handlers(content: memoryview) -> bool:
    """Whether the frames with this common part state handlers; ValueError if it is not one."""
    match = _COMMON.match(content[: _LETTERS + _POINTER])
    if match is None:
        raise ValueError("an unknown form")
    # A byte of how it is written for each letter, and behind that of P the place of a function.
    position = match.end() + 1
    for letter in match["letters"].decode():
        if letter in "PLR":
            form = content[position]
            if form not in ((0x1B, 0x9B) if letter == "P" else (0x1B,)):
                raise ValueError("addresses in an unknown form")
            position += 1 + (_POINTER if letter == "P" else 0)
    if position - match.end() - 1 != content[match.end()]:
        raise ValueError("another length")
    return b"L" in match["letters"]


def _require_code(file: elf.Elf, sizes: Mapping[int, int]) -> None:
    """BuildError where a function is not within one section of code."""
    parts = sorted(
        (one.address, one.address + one.size) for one in file.sections if one.flags & _EXECUTABLE
    )
    for start, size in sizes.items():
        at = bisect_right(parts, (start, 1 << 64)) - 1
        if at < 0 or start + size > parts[at][1]:
            raise _damaged(file.where)


def _require_handlers(file: elf.Elf, addresses: list[int]) -> None:
    """BuildError where a function's handlers are no such table."""
    homes = file.named(_HANDLERS)
    for address in addresses:
        if len(homes) != 1 or not 0 <= address - homes[0].address < len(homes[0].content):
            raise _damaged(file.where)
        place = address - homes[0].address
        if _HANDLER.match(homes[0].content[place : place + 8]) is None:
            raise BuildError(
                f"{file.where}: expected a table of handlers in {_HANDLERS} at {address:#x}, as a "
                "frame of .eh_frame states, found other bytes"
            )


def _damaged(where: str) -> BuildError:
    return BuildError(
        f"{where}: expected .eh_frame_hdr to list the functions of .eh_frame, found it damaged; "
        "link the library again"
    )
