"""Reads the kernel facts of a library: what each kernel of its table launches, and with what."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from flashvar.binaries.manifest import Launch
from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import elf

# struct KernelFacts of the CUDA sources: row, kernel, family, when, threads, shared memory, tile.
_FACTS = struct.Struct("<64s32s16s160s2i4i")
_MOST: Final = 1 << 14  # ours has a few hundred
_ALIGNMENT = 4  # of its integers


def read(library: Path, section: str) -> dict[str, tuple[Launch, ...]]:
    """Those of a library, in `section`, by row of the kernel table."""
    return parse(elf.section(library, section) or b"", f"{library}, {section}")


def parse(content: bytes, where: str) -> dict[str, tuple[Launch, ...]]:
    """Those of a section that came from `where`, by row; each row's in their order."""
    facts: dict[str, list[Launch]] = {}
    offset = 0
    elf.limit(len(content) // _FACTS.size, "kernel facts", where, _MOST)
    while offset < len(content):
        if content[offset] == 0:  # padding: the compiler may align them beyond their size
            offset += _ALIGNMENT
            continue
        if offset + _FACTS.size > len(content):
            raise BuildError(
                f"{where}: expected kernel facts of {_FACTS.size} bytes, found "
                f"{len(content) - offset} bytes at its end"
            )
        *texts, threads, shared_memory, a, b, c, d = _FACTS.unpack_from(content, offset)
        row, kernel, family, when = (_text(text, where) for text in texts)
        tile = tuple(size for size in (a, b, c, d) if size)
        launch = Launch(kernel, family, when, tile, threads, shared_memory)
        facts.setdefault(row, []).append(launch)
        offset += _FACTS.size
    return {row: tuple(launches) for row, launches in facts.items()}


def _text(field: bytes, where: str) -> str:
    text, _, rest = field.partition(b"\0")
    try:
        if any(rest):
            raise ValueError(f"bytes behind the text {text!r}")
        return text.decode("utf-8")
    except ValueError as error:
        raise BuildError(f"{where}: expected UTF-8 text in kernel facts: {error}") from None
