"""The lock of a build directory, and subprocesses that end with their parent.

A program that is started under the lock inherits it, so the lock is held until the last one ends.
Each program gets a session of its own, so that all of its children can be ended with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from flashvar_factory.errors import BuildError

LOCK: Final = ".lock"
# How a program is ended, and the seconds that it then has. nvcc and Python remove their temporary
# files after an interrupt alone.
_ENDINGS: Final = ((signal.SIGINT, 3.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make the folder and hold its lock; BuildError where another build does."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError(
                f"{directory}: expected no other build in this folder, found one; wait for its end"
            ) from None
        os.set_inheritable(file.fileno(), True)
        yield


def run(
    command: Sequence[str],
    *,
    quiet: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    umask: int = -1,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; `quiet` keeps what it prints, stderr in it, as stdout.

    Where this process is interrupted or terminated, the program and what it started end first.
    For the main thread alone, which signals come to.
    """
    sys.stdout.flush()
    process: subprocess.Popen[str] | None = None
    try:
        with _undisturbed():
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE if quiet else None,
                stderr=subprocess.STDOUT if quiet else None,
                text=True,
                errors="backslashreplace",  # a program prints what it likes
                env=env,
                cwd=cwd,
                umask=umask,
                close_fds=False,  # of ours, locks alone can be inherited
                start_new_session=True,
            )
        printed, _ = process.communicate()
    except BaseException:
        if process is not None:
            _end(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, printed)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay signals until the end: one while a program starts would leave it running."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a program and what it started; terminate, then kill what does not go."""
    for number, seconds in _ENDINGS:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):  # all are gone
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.02)
    process.wait()


def end_on_sigterm() -> None:
    """Let SIGTERM unwind this process, as an interrupt does, instead of cutting it off."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: object) -> None:
    del frame
    raise SystemExit(128 + number)
