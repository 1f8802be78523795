"""Times contenders as `doctor --bench` does, and reads the card's clocks while they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.environment import clocks
from flashvar.cli import timing
from flashvar.cli.timing import Timing

__all__ = ["Measurement", "Timing", "measure"]


@dataclass(frozen=True)
class Measurement:
    """Timings by contender, and the card's clocks while they were taken."""

    timings: dict[str, Timing]
    clocks: dict[str, float]


def measure(contenders: Mapping[str, Callable[[], object]], *, seconds: float) -> Measurement:
    """Times every contender on the current device; see flashvar.cli.timing."""
    found: dict[str, float] = {}
    timings = timing.measure(contenders, seconds=seconds, enqueued=lambda: found.update(clocks()))
    return Measurement(timings, found)
