"""Times calls of flashvar and its peers on a CUDA device; rates are those of the median call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from flashvar.cli import progress
from flashvar.cli.diagnosis import Report
from flashvar.cli.speed import (
    OURS,
    SECONDS,
    Call,
    Cell,
    OpSpeed,
    Result,
    Speed,
    record_of,
    timed_ops,
)
from flashvar.cli.timing import measure
from flashvar.selection.rules import select

# Returns milliseconds of each contender's median call; the second argument limits the seconds.
Timer = Callable[[dict[str, Call], float], dict[str, float]]

_NOTHING: Final = "nothing"


def check(report: Report, number: int, *, quiet: bool, timer: Timer | None = None) -> Speed:
    """Time every cell on `cuda:number`."""
    device = report.system.device(number)
    if device is None:
        return Speed(number, None, why=f"torch sees no cuda:{number}")
    cells = [(name, op, cell) for name, op in timed_ops().items() for cell in op.CELLS]
    results = []
    with torch.cuda.device(number):
        for name, op, cell in progress.follow(cells, lambda one: one[2].name, quiet=quiet):
            candidate = _candidate(report, number, cell)
            calls, failures = _calls(op, cell, candidate, torch.device("cuda", number))
            times = (timer or _median_ms)(calls, SECONDS / len(cells)) if calls else {}
            rates = {contender: cell.work / spent / 1e9 for contender, spent in times.items()}
            results.append(Result(name, cell, candidate, rates, failures))
    return Speed(number, device.name, tuple(results), record_of(device.name))


def _candidate(report: Report, number: int, cell: Cell) -> str:
    """The candidate that runs flashvar's calls."""
    request = cell.request(number)
    decision = select(request, report.system, report.inventory, report.overrides)
    return _NOTHING if decision.chosen is None else decision.chosen.candidate


def _median_ms(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    found = measure(calls, seconds=seconds / len(calls))
    return {name: one.median_ms for name, one in found.items()}


def _calls(
    op: OpSpeed, cell: Cell, candidate: str, device: torch.device
) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls to time, each already called once, and the reasons why others are not timed."""
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    # The reference takes minutes, and more memory than most GPUs have.
    if candidate in (_NOTHING, "reference"):
        failures[OURS] = f"{candidate} runs it"
    for name in (one for one in (OURS, *op.PEERS) if one not in failures):
        try:
            call = op.call(cell, name, device)
            call()
            calls[name] = call
        except Exception as error:  # a call that a peer cannot run is a result, not a failure
            failures[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return calls, failures
