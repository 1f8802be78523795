"""Exit codes of a command whose output cannot be written."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

# 128 + SIGPIPE, the shell's convention.
READER_GONE = 128 + 13
NOT_WRITTEN = 1


def delivered(program: str, command: Callable[[], int]) -> int:
    """Run a command and write its output; returns the exit code.

    Output to a stdout or stderr that is closed from the start is dropped. A reader that closes the
    pipe ends the command.
    """
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        # Python sets a stream to None that was closed before the process began.
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
        return _run(program, command)


def is_full(stream: TextIO) -> bool:
    """Whether a stream is a file on a full disk, or a device that takes nothing."""
    try:
        stream.flush()
    except (OSError, ValueError):  # ValueError: it is closed
        return True
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # in memory
        return False
    found, null = os.fstat(number), Path(os.devnull).stat()
    if stat.S_ISREG(found.st_mode):
        return os.fstatvfs(number).f_bavail == 0
    is_device = stat.S_ISCHR(found.st_mode) and found.st_rdev != null.st_rdev
    return is_device and not os.isatty(number)


def complain(message: str) -> None:
    """Print an error after all output before it, also where both go to one file or pipe."""
    with contextlib.suppress(OSError):  # delivered() tells
        sys.stdout.flush()
    print(message, file=sys.stderr)


def _run(program: str, command: Callable[[], int]) -> int:
    try:
        try:
            code = command()
        except SystemExit:  # of --help too
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        _discard(sys.stderr)
        return READER_GONE
    except OSError as error:
        if error.filename is not None:  # a file, not a stream
            raise
        _discard(sys.stdout)
        message = f"{program}: expected to write the output, found: {error.strerror or error}"
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)
        return NOT_WRITTEN
    return code


def _discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that flushing its buffer at exit does not fail."""
    with contextlib.suppress(OSError, ValueError):  # the stream has no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
