"""Times device calls: CUDA events, warm-up, a cold L2 cache, interleaved, median and spread.

The card slows down as it warms up, so contenders that run one after the other are not compared on
the same card. Here every round calls each contender once, in an order that rotates from round to
round; very slow ones take part in some rounds, from the first to the last. Before each call the
device writes memory for longer than the host takes to enqueue the call: a figure is time of the
device, also where the host is slower. A call that waits for the device itself is timed with that
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles
from time import perf_counter
from typing import Final

import torch

_WARM_UP_CALLS: Final = 3
_ROUNDS: Final = (7, 60)  # fewest (enough for a spread) and most
# A contender that takes longer than this many times the one of middling speed gets the fewest
# rounds: more would take minutes.
_SLOW: Final = 10.0
# Most writes of the cache before a call, several milliseconds: a host that takes longer for a call
# is waiting for the device.
_MAX_WRITES: Final = 256
_TIMED_WRITES: Final = 20  # one behind another, to time a write


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median and the 20th and 80th percentile of `rounds` calls."""

    median_ms: float
    low_ms: float
    high_ms: float
    rounds: int


def summarise(milliseconds: list[float]) -> Timing:
    """Median and spread of at least two timings."""
    fifths = quantiles(milliseconds, n=5, method="inclusive")
    return Timing(median(milliseconds), fifths[0], fifths[-1], len(milliseconds))


def measure(
    contenders: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    enqueued: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times every contender on the current device in interleaved rounds.

    Args:
        contenders: name to a call that enqueues work on the current stream.
        seconds: device time to spend on the one of middling speed; the others run as often, but
            for very slow ones.
        enqueued: called when all calls are enqueued, while the device is still working on them.
    """
    if not contenders:
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # Twice the cache: writing it leaves nothing of the inputs there.
    flush = torch.empty(2 * properties.L2_cache_size, dtype=torch.int8, device="cuda")
    spent = [_warm_up(call) for call in contenders.values()]
    rounds = rounds_for([device for device, _ in spent], seconds)
    writes = writes_for(max(host for _, host in spent), _write_ms(flush))

    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in contenders}
    for name in turns(dict(zip(contenders, rounds, strict=True))):
        for _ in range(writes):
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        contenders[name]()
        end.record()
        events[name].append((start, end))
    enqueued()
    torch.cuda.synchronize()
    return {n: summarise([start.elapsed_time(end) for start, end in e]) for n, e in events.items()}


def rounds_for(milliseconds: Sequence[float], seconds: float) -> list[int]:
    """How often to call each of some contenders; a very slow one does not thin out the others."""
    middling = max(median(milliseconds), 1e-3)
    rounds = min(max(int(1000 * seconds / middling), _ROUNDS[0]), _ROUNDS[1])
    return [rounds if one <= _SLOW * middling else _ROUNDS[0] for one in milliseconds]


def turns(rounds: Mapping[str, int]) -> Iterator[str]:
    """The contenders in the order of their calls, each as often as its number of rounds.

    Whoever takes part in fewer rounds does so at equal distances: all see the card warm up.
    """
    names, most = list(rounds), max(rounds.values())
    for index in range(most):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            if index * rounds[name] // most < (index + 1) * rounds[name] // most:
                yield name


def writes_for(host: float, write: float) -> int:
    """How many writes of the cache take the device longer than the host needs to enqueue a call.

    Args:
        host: milliseconds of the host for a call.
        write: milliseconds of the device for a write.
    """
    return min(1 + ceil(host / max(write, 1e-3)), _MAX_WRITES)


def _write_ms(flush: torch.Tensor) -> float:
    """Milliseconds of the device for a write of the cache, of several behind one another."""

    def write() -> None:
        for _ in range(_TIMED_WRITES):
            flush.zero_()

    return _warm_up(write)[0] / _TIMED_WRITES


def _warm_up(call: Callable[[], object]) -> tuple[float, float]:
    """Runs the call a few times; milliseconds of the last one, of the device and of the host."""
    for _ in range(_WARM_UP_CALLS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        began = perf_counter()
        call()
        host = 1000 * (perf_counter() - began)
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end)), host
