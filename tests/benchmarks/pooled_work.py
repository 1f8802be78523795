"""Work for the processes of a benchmark's worker pool in tests; they import it by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ready: list[str] = []


def prepare(names: Sequence[str]) -> None:
    """Get ready; a case named "broken" cannot."""
    if "broken" in names:
        raise ValueError("it cannot be prepared")
    _ready.extend(names)


def touch(paths: Sequence[str]) -> None:
    """Make files."""
    for path in paths:
        Path(path).touch(exist_ok=False)


def measure(name: str) -> list[dict[str, Any]]:
    """Who measured what; "deadly" ends the process.

    "slow FILE" interrupts who waits for it, and makes the file half a minute later.
    """
    if name.startswith("slow "):
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(30)
        Path(name.removeprefix("slow ")).touch()
    if name == "deadly":
        os._exit(3)
    return [{"case": name, "process": os.getpid(), "ready": " ".join(_ready)}]


def lost(name: str, why: str) -> list[dict[str, Any]]:
    """What is recorded of a case that broke."""
    return [{"case": name, "skipped": why}]
