"""An end for a reader that hangs on damaged input, or that takes all memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SECONDS = 60  # for one input: the slowest takes 0.1 s, the import of a validator seconds
GIGABYTES = 4  # beside what the process has when a test begins


@contextmanager
def bounded() -> Iterator[None]:
    """An end for what hangs, and for what takes all memory."""

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise TimeoutError(f"more than {SECONDS} s for one input")

    before = signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    room = pages * resource.getpagesize() + (GIGABYTES << 30)
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
