"""Reads the table by which exceptions find their way: where each function of a library begins."""

from __future__ import annotations

import struct
from typing import Final

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
    found: dict[int, int] = {}
    last = -1
    for function, frame in _ROW.iter_unpack(rows):
        start = table.address + function
        at = table.address + frame - frames[0].address
        if start <= last or at < 0 or at + _FRAME.size > len(frames[0].content):
            raise _damaged(file.where)
        *_, begins, size = _FRAME.unpack_from(frames[0].content, at)
        if frames[0].address + at + _BEGINNING + begins != start:
            raise _damaged(file.where)
        found[start] = size
        last = start
    return found


def _damaged(where: str) -> BuildError:
    return BuildError(
        f"{where}: expected .eh_frame_hdr to list the functions of .eh_frame, found it damaged"
    )
