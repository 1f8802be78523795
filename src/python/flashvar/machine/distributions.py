"""Reads the metadata of installed distributions, even if their files are damaged.

importlib.metadata waits for a named pipe, reads a file of any size, and fails on one that is not
UTF-8.
"""

from __future__ import annotations

import stat
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Final

from flashvar.machine import bounded_read

_LARGEST: Final = 16 << 20  # bytes of a file of metadata


def find(name: str, version: str | None = None) -> metadata.Distribution | None:
    """The distribution of a name that is installed; None if there is none.

    Of several the first, which Python imports; or the one of a `version` that was imported, before
    what an installer that was interrupted left of others.
    """

    def rank(one: metadata.Distribution) -> tuple[bool, bool]:
        found = fields(one)["Version"]
        return found != version, found is None

    every = metadata.distributions(name=name)
    return next(iter(every), None) if version is None else min(every, key=rank, default=None)


def fields(distribution: metadata.Distribution) -> Message:
    """The fields of its METADATA, or what an egg has instead; none if it cannot be read."""
    texts = (text(distribution, file) for file in ("METADATA", "PKG-INFO", ""))
    return HeaderParser().parsestr(next(filter(None, texts), ""))


def text(distribution: metadata.Distribution, file: str) -> str:
    """A file of its metadata; empty if it cannot be read."""
    folder = _folder(distribution)
    try:
        if folder is None:
            return distribution.read_text(file) or ""
        return bounded_read.text(folder / file, _LARGEST)
    except Exception:  # that of an archive, or of a finder that is not Python's, raises anything
        return ""


def obstacle(distribution: metadata.Distribution, file: str) -> str | None:
    """Why importlib.metadata would never finish reading a file; None if it would."""
    folder = _folder(distribution)
    try:
        found = None if folder is None else (folder / file).stat()
    except OSError:
        return None
    if found is None or stat.S_ISDIR(found.st_mode):  # as good as missing
        return None
    if not stat.S_ISREG(found.st_mode):
        return "no regular file"
    return f"more than {_LARGEST} bytes" if found.st_size > _LARGEST else None


def _folder(distribution: metadata.Distribution) -> Path | None:
    """Where its metadata lies; None for a distribution in an archive or without files."""
    folder = getattr(distribution, "_path", None)  # has no public name
    return folder if isinstance(folder, Path) else None
