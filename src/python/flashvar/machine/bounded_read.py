"""Reads files of an environment; what has the name of a file may be a pipe, or huge."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def text(path: Path, largest: int) -> str:
    """The text of a file; OSError if it is not a regular file, or has more than `largest` bytes."""
    # Non-blocking: opening a FIFO would wait for a writer.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError("it is no regular file")
        data = file.read(largest + 1)
    if len(data) > largest:
        raise OSError(f"it has more than {largest} bytes")
    return data.decode("utf-8")
