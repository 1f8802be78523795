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
from flashvar_factory.inspect import elf

SECTIONS: Final = (".nv_fatbin", "__nv_relfatbin")
SASS: Final = "sass"
PTX: Final = "ptx"
# The first bytes of a container: magic, version 1, a header of 16 bytes.
START: Final = b"\x50\xed\x55\xba\x01\x00\x10\x00"
# What flags say: 64 bits, Linux; what follows; options of ptxas.
USUAL: Final = 0x11
KNOWN: Final = USUAL | 0x2000 | 0x8000 | 0x100000 | 0x200000 | 0x1000000
# Bytes of one image, opened; the largest of ours has 0.6 MB.
IMAGE_BYTES: Final = 1 << 28
_PIECE: Final = 1024  # compressed bytes at a time: at most 32 MB, opened
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# Of a library: a hundred images with 100 MB are many.
IMAGES: Final = 4096
TOTAL_BYTES: Final = 1 << 30
_ZEROS: Final = 1 << 12  # between containers

_CONTAINER = struct.Struct("<8sQ")  # START, bytes of the entries
# kind, version, bytes of the header, of the payload, of it without padding if compressed, options,
# minor and major version of the code's format, architecture, offset and length of a name, flags,
# zero, bytes once opened
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_VERSION: Final = 0x101
_KINDS: Final = {1: PTX, 2: SASS}
_LZ4, _ZSTD = 0x2000, 0x8000
_SUFFIXES: Final = {0x100000: "a", 0x200000: "f"}


@dataclass(frozen=True)
class Image:
    """One entry: PTX, or the machine code of one architecture."""

    kind: str  # "sass", "ptx", or the number of a kind that is not known
    code: str  # passed to the compiler, e.g. "90a"
    compression: str | None  # "zstd", "lz4"
    stored: memoryview  # the payload as it is in the file
    opened_bytes: int
    form: tuple[int, int]  # of PTX, its version; of a cubin, 1 and the version of its ABI
    flags: int
    words: bytes  # behind the header: the name of a source file, options of ptxas

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
    opened = 0
    for start, end in _containers(section, where):
        for image in _entries(section[start + _CONTAINER.size : end], where):
            found.append(image)
            opened += image.opened_bytes
            if len(found) > IMAGES or opened > TOTAL_BYTES:
                raise BuildError(
                    f"{where}: expected at most {IMAGES:,} images of device code, of "
                    f"{TOTAL_BYTES:,} bytes when they are opened, found {len(found):,} of "
                    f"{opened:,} bytes or more"
                )
    return found


def places(section: memoryview, where: str) -> list[int]:
    """Where the containers of a section begin."""
    return [start for start, _ in _containers(section, where)]


def _containers(section: memoryview, where: str) -> Iterator[tuple[int, int]]:
    """The beginning and the end of each container."""
    position = count = 0
    while position < len(section):
        padding = bytes(section[position : position + 8])
        if not any(padding):
            data = elf.data_in(section, position)
            zeros = (len(section) if data is None else data) - position
            elf.limit(zeros, "zeros between containers of device code", where, _ZEROS)
            position += -(-zeros // 8) * 8 if data is None else zeros // 8 * 8  # they are aligned
            continue
        if START.startswith(padding) and padding != START:
            raise _cut_short(where, position)
        if padding != START:
            magic = int.from_bytes(padding[:4], "little")
            raise BuildError(
                f"{where}: expected device code at byte {position} of its section, found "
                f"{magic:#010x}; it is damaged, or of a newer toolkit than this audit knows"
            )
        if position + _CONTAINER.size > len(section):
            raise _cut_short(where, position)
        _, size = _CONTAINER.unpack_from(section, position)
        end = position + _CONTAINER.size + size
        if end > len(section):
            raise _cut_short(where, position + _CONTAINER.size)
        count += 1
        elf.limit(count, "containers of device code", where, IMAGES)
        yield position, end
        position = end


def _entries(entries: memoryview, where: str) -> Iterator[Image]:
    position = 0
    while position < len(entries):
        if position + _ENTRY.size > len(entries):
            raise _cut_short(where, position)
        row = _ENTRY.unpack_from(entries, position)
        kind, header, size, compressed, architecture, flags = (row[i] for i in (0, 2, 3, 4, 8, 11))
        start, position = position + header, position + header + size
        if position > len(entries) or header < _ENTRY.size:
            raise _cut_short(where, start)
        if (
            row[1] != _VERSION
            or row[9] + row[10] > header
            or row[12]
            or flags >> 32
            or flags & (_LZ4 | _ZSTD) == _LZ4 | _ZSTD
        ):
            raise BuildError(
                f"{where}: expected the header of an image of device code, of version "
                f"{_VERSION:#x}, found version {row[1]:#x}, flags {flags:#x}, {row[12]:#x} in "
                "place of zero, or a name beyond it; it is damaged, or of a newer toolkit than "
                "this audit knows"
            )
        squeezed = bool(flags & (_ZSTD | _LZ4))
        stored = compressed if squeezed else size
        if not 0 < stored <= size or elf.data_in(entries[start + stored : position]) is not None:
            raise BuildError(
                f"{where}: expected {stored} of {size} bytes to be an image of device code and the "
                "rest zeros, found other bytes"
            )
        yield Image(
            kind=_KINDS.get(kind, str(kind)),
            code=f"{architecture}{''.join(s for bit, s in _SUFFIXES.items() if flags & bit)}",
            compression="zstd" if flags & _ZSTD else "lz4" if flags & _LZ4 else None,
            stored=entries[start : start + stored],
            opened_bytes=row[13] if squeezed else stored,
            form=(row[7], row[6]),
            flags=flags,
            words=bytes(entries[start - header + _ENTRY.size : start]),
        )


def _cut_short(where: str, position: int) -> BuildError:
    return BuildError(f"{where}: expected whole device code, found it cut short at byte {position}")


def _unpack(data: memoryview, size: int) -> bytes:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ToolchainError(
            "expected the library zstandard, which opens compressed device code, found none; "
            "pip install auditwheel zstandard"
        ) from None
    if size > IMAGE_BYTES:
        raise BuildError(f"expected at most {IMAGE_BYTES:,} bytes of device code, found {size:,}")
    content, position = bytearray(), 0
    try:
        # In pieces: what a frame states of its own size would be allocated at once.
        unpacker = zstandard.ZstdDecompressor(max_window_size=IMAGE_BYTES).decompressobj()
        while position < len(data) and not unpacker.eof and len(content) <= size:
            content += unpacker.decompress(data[position : position + _PIECE])
            position += _PIECE
    except (zstandard.ZstdError, MemoryError) as error:
        raise BuildError(f"expected device code compressed by zstd, found: {error}") from error
    if len(content) != size:
        raise BuildError(f"expected {size} bytes of device code, found {len(content)}")
    if not unpacker.eof or unpacker.unused_data or position < len(data):
        raise BuildError("expected one frame of zstd in an image, found less, or data after it")
    if bytes(data[: len(_ZSTD_MAGIC)]) != _ZSTD_MAGIC:
        raise BuildError("expected a frame of zstd that has content, found one that is skipped")
    return bytes(content)
