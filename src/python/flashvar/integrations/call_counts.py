"""Counts of calls by outcome, of the process and of each thread."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["CallCounts"]


class _Thread(threading.local):
    count = 0


class CallCounts:
    """Counts of calls by outcome. Threads may count at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._thread = _Thread()

    def add(self, outcome: str) -> None:
        """Count a call."""
        with self._lock:
            self._counts[outcome] += 1
        self._thread.count += 1

    def counts(self) -> dict[str, int]:
        """The calls of all threads since the last `clear`."""
        with self._lock:
            return dict(self._counts)

    def clear(self) -> None:
        """Forget the calls of all threads; `of_this_thread` goes on."""
        with self._lock:
            self._counts.clear()

    def of_this_thread(self) -> int:
        """The calls of the current thread; a difference tells whether a call in between counted."""
        return self._thread.count
