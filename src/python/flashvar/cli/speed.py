"""The results of `doctor --bench`, beside the rates recorded for a GPU of the same name.

`OpSpec.speed` names the modules with the calls that are timed for an op.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from flashvar import ops
from flashvar.ops.op import Value
from flashvar.selection.request import Request

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]
# Not a path: flashvar may run from an archive.
RECORDED: Final = resources.files(__package__) / "recorded.json"
SCHEMA: Final = 2
SECONDS: Final = 10.0
OURS: Final = "flashvar"


@dataclass(frozen=True)
class Cell:
    """One call that is timed."""

    name: str  # for people and in the record, e.g. "forward, row dim 64"
    function: str
    dtype: str
    axes: tuple[Value, ...]
    work: float  # of one call: operations, or bytes moved

    def request(self, device: int) -> Request:
        """The selection request of the call."""
        return Request(self.function, self.dtype, device, self.axes)


class OpSpeed(Protocol):
    """The contents of a module of `OpSpec.speed`."""

    TITLE: str  # with the unit, 10^12 of work per second
    NOTE: str  # describes the inputs
    PEERS: Mapping[str, str]  # contender -> heading of its column
    CELLS: tuple[Cell, ...]
    # What benchmarks time beside them: `doctor --bench` would take too long, or too much memory.
    MORE_CELLS: tuple[Cell, ...]
    # So small that the host is all of their time, which benchmarks time.
    SMALL_CELLS: tuple[Cell, ...]

    def call(self, cell: Any, contender: str, device: torch.device) -> Call:
        """A call of OURS or of a peer, with its inputs; raises if the contender cannot run it."""
        ...


def timed_ops() -> dict[str, OpSpeed]:
    """The modules of the ops that are timed, by what each times: an op or one function of it."""
    return {
        name: cast("OpSpeed", importlib.import_module(module))
        for spec in ops.specs()
        for name, module in spec.speed.items()
    }


@dataclass(frozen=True)
class Result:
    """One cell: the candidate that ran it, and the rates by contender, in 10^12 per second."""

    op: str
    cell: Cell
    candidate: str
    rates: Mapping[str, float]
    failures: Mapping[str, str]  # contender -> why it has no rate


@dataclass(frozen=True)
class Record:
    """The recorded measurement on a GPU of this name: rates by op, cell and contender."""

    gpu: str
    time: str
    torch: str
    driver: str
    cells: Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Speed:
    """The measurement on one device; `why` is the reason if nothing was measured."""

    device: int
    gpu: str | None
    results: tuple[Result, ...] = ()
    record: Record | None = None
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The section `bench` of doctor's JSON."""
        return {
            "device": self.device,
            "gpu": self.gpu,
            "why_not": self.why,
            "recorded": None if self.record is None else self._record(self.record),
            "cells": [self._cell(one) for one in self.results],
        }

    def recorded(self, result: Result) -> Mapping[str, float]:
        """The recorded rates of a cell."""
        of_op = {} if self.record is None else self.record.cells.get(result.op, {})
        return of_op.get(result.cell.name, {})

    def ratio(self, result: Result) -> float | None:
        """Flashvar's rate divided by the recorded rate; None if either is missing."""
        recorded = self.recorded(result)
        if OURS not in recorded or OURS not in result.rates:
            return None
        return result.rates[OURS] / recorded[OURS]

    @staticmethod
    def _record(record: Record) -> dict[str, str]:
        return {key: value for key, value in vars(record).items() if key != "cells"}

    def _cell(self, result: Result) -> dict[str, Any]:
        return {
            "op": result.op,
            "cell": result.cell.name,
            "candidate": result.candidate,
            "rates": dict(result.rates),
            "recorded_rates": dict(self.recorded(result)),
            "failures": dict(result.failures),
        }


def record_of(gpu: str) -> Record | None:
    """The record that the package has for a GPU of this name."""
    found = json.loads(RECORDED.read_text(encoding="utf-8"))["gpus"].get(gpu)
    return None if found is None else Record(gpu, **found)
