"""The temporary folder that wheels are downloaded, checked and packed in."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from flashvar.errors import InstallError

# Ctrl-C, an orderly end of the process, a terminal that is closed (Windows has no such signal).
_NAMES: Final = ("SIGINT", "SIGTERM", "SIGHUP")
_ENDING: Final = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
# How Python handles them by default; a signal that is ignored, as under nohup, stays ignored.
_DEFAULTS: Final = (signal.SIG_DFL, signal.default_int_handler)


class Ended(KeyboardInterrupt):
    """A signal asked the process to end; `args` holds its number."""


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder that only this user can read; it is removed at the end, also by a signal.

    Raises:
        InstallError: it cannot be made.
        Ended: a signal came; further ones are ignored until the folder is removed.
    """
    with _ended_once():
        with writing(Path("the temporary folder")):
            made = tempfile.TemporaryDirectory(prefix="flashvar-install-")
        with made as name:
            yield Path(name)


@contextmanager
def _ended_once() -> Iterator[None]:
    """Turn the first signal that asks the process to end into Ended, and ignore the others.

    Python handles signals in the main thread alone: in another one nothing is changed.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _ENDING if in_main_thread}
    handlers = {number: one for number, one in handlers.items() if one in _DEFAULTS}

    def end(number: int, frame: object) -> None:
        del frame
        for one in handlers:
            signal.signal(one, signal.SIG_IGN)
        raise Ended(number)

    for number in handlers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into `path` into a sentence.

    Raises:
        InstallError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InstallError(
            f"expected to write into {path}, found: {error.strerror or error}; nothing was "
            "installed: free space, or name another folder in TMPDIR"
        ) from error
