"""How does a command end when what it prints cannot be delivered? In a word, with an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

# 128 and the number of SIGPIPE, as a shell says it.
READER_GONE = 128 + 13
NOT_WRITTEN = 1


def delivered(program: str, command: Callable[[], int]) -> int:
    """Run a command and deliver what it printed; the exit code.

    A closed stdout or stderr takes everything. A reader that has seen enough ends the command.
    """
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        # None where it was closed before this process began.
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
        return _run(program, command)


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
        said = f"{program}: expected to write the output, found: {error.strerror or error}"
        with contextlib.suppress(OSError):
            print(said, file=sys.stderr, flush=True)
        return NOT_WRITTEN
    return code


def _discard(stream: TextIO) -> None:
    """Let what is left in a stream go nowhere: writing it must not fail at exit."""
    with contextlib.suppress(OSError, ValueError):  # without a file below it
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
