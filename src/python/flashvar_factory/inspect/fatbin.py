"""Reads a `.nv_fatbin` section: containers, one after the other, of images of device code.

The layout is what nvcc 12 and 13 write: a container has a header and then entries; an entry is PTX
or an ELF file (a cubin) of one architecture, plain or compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from flashvar_factory.errors import BuildError, ToolchainError

SECTIONS: Final = (".nv_fatbin", "__nv_relfatbin")
SASS: Final = "sass"
PTX: Final = "ptx"

_MAGIC: Final = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of the entries
# kind, version, bytes of the header, of the payload, of it without padding if compressed, options,
# minor, major, architecture, offset and length of a name, flags, zero, bytes once opened
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_KINDS: Final = {1: PTX, 2: SASS}
_LZ4, _ZSTD = 0x2000, 0x8000
_SUFFIXES: Final = {0x100000: "a", 0x200000: "f"}


@dataclass(frozen=True)
class Image:
    """One entry: PTX, or the machine code of one architecture."""

    kind: str  # "sass", "ptx", or the number of a kind that is not known
    code: str  # what the compiler was told, e.g. "90a"
    compression: str | None  # "zstd", "lz4"
    stored: memoryview  # the payload as it is in the file
    opened_bytes: int

    def opened(self) -> memoryview | None:
        """The payload uncompressed; None for lz4, which no image of ours is.

        BuildError when it is not what its entry says.
        """
        if self.compression is None:
            return self.stored
        if self.compression == "lz4":
            return None
        return memoryview(_unpack(self.stored, self.opened_bytes))


def images(section: memoryview, where: str) -> list[Image]:
    """Every image of a section; BuildError when the section is cut short, or is something else."""
    found: list[Image] = []
    position = 0
    try:
        while position < len(section):
            if section[position : position + 8] == bytes(8)[: len(section) - position]:
                position += 8  # containers are aligned
                continue
            magic, _, header, size = _CONTAINER.unpack_from(section, position)
            if magic != _MAGIC:
                raise BuildError(
                    f"{where}: expected device code at byte {position} of its section, found "
                    f"{magic:#010x}; it is damaged, or of a newer toolkit than this audit knows"
                )
            end = position + header + size
            found += _entries(section[:end], position + header, end)
            position = end
    except (struct.error, IndexError) as error:
        raise BuildError(
            f"{where}: expected whole device code, found it cut short at byte {position}"
        ) from error
    return found


def _entries(section: memoryview, position: int, end: int) -> Iterator[Image]:
    if len(section) < end:
        raise IndexError(end)
    while position < end:
        row = _ENTRY.unpack_from(section, position)
        kind, header, size, compressed, architecture, flags = (row[i] for i in (0, 2, 3, 4, 8, 11))
        start, position = position + header, position + header + size
        if position > end or header < _ENTRY.size:
            raise IndexError(position)
        stored = compressed or size
        yield Image(
            kind=_KINDS.get(kind, str(kind)),
            code=f"{architecture}{''.join(s for bit, s in _SUFFIXES.items() if flags & bit)}",
            compression="zstd" if flags & _ZSTD else "lz4" if flags & _LZ4 else None,
            stored=section[start : start + stored],
            opened_bytes=row[13] or stored,
        )


def _unpack(data: memoryview, size: int) -> bytes:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ToolchainError(
            "expected the library zstandard, which opens compressed device code, found none; "
            "pip install zstandard"
        ) from None
    try:
        content: bytes = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise BuildError(f"expected device code compressed by zstd, found: {error}") from error
    if len(content) != size:
        raise BuildError(f"expected {size} bytes of device code, found {len(content)}")
    return content
