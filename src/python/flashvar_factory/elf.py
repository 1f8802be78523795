"""What is in a section of an ELF file? 64 bit, little endian, as all our libraries are."""

from __future__ import annotations

import struct
from pathlib import Path

from flashvar.errors import BuildError

_HEADER = struct.Struct("<16s2HI3QI6H")
_SECTION = struct.Struct("<2I4Q2I2Q")
_MAGIC = b"\x7fELF\x02\x01"
_NO_BITS = 8  # a section without bytes in the file (.bss)


def section(path: Path, name: str) -> bytes | None:
    """The bytes of the section called `name`, None when there is none of them.

    BuildError when the file is no such ELF file, or a truncated one.
    """
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise BuildError(f"{path}: expected a 64-bit little-endian ELF file, found {data[:6]!r}")
    try:
        return _find(data, name.encode())
    except (struct.error, IndexError) as error:
        raise BuildError(f"{path}: expected a whole ELF file, found a truncated one") from error


def _find(data: bytes, name: bytes) -> bytes | None:
    header = _HEADER.unpack_from(data)
    table, entry_size, count, names_index = header[6], header[11], header[12], header[13]
    sections = [_SECTION.unpack_from(data, table + i * entry_size) for i in range(count)]
    names = _content(data, sections[names_index])
    for entry in sections:
        start = entry[0]
        if names[start : names.index(b"\0", start)] == name:
            return _content(data, entry) if entry[1] != _NO_BITS else b""
    return None


def _content(data: bytes, entry: tuple[int, ...]) -> bytes:
    offset, size = entry[4], entry[5]
    if offset + size > len(data):
        raise IndexError(offset)
    return data[offset : offset + size]
