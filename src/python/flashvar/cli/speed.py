"""What `doctor --bench` measures, and what of it was recorded for a GPU of the same name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

# No path: flashvar may run from an archive.
RECORDED: Final = resources.files(__package__) / "recorded.json"
SCHEMA: Final = 1
# Everything measured holds the same number of tokens and the same width, as in the benchmarks.
DTYPE: Final = "bf16"
TOKENS: Final = 16384
WIDTH: Final = 2048
SEQLEN: Final = 4096
SECONDS: Final = 10.0
OURS: Final = "flashvar"
# Names of contenders, and their heads in tables.
PEERS: Final = {"sdpa-flash": "SDPA flash", "sdpa-cudnn": "SDPA cuDNN"}
# Matrix products of a call, each 2 * heads * seqlen^2 * head_dim operations a sequence.
_PRODUCTS: Final = {"forward": 2, "backward": 5}


@dataclass(frozen=True)
class Cell:
    """Causal attention over TOKENS tokens in sequences of SEQLEN."""

    direction: str
    head_dim: int

    @property
    def name(self) -> str:
        """As people and files call it."""
        return f"{self.direction}, head dim {self.head_dim}"

    @property
    def batch(self) -> int:
        """How many sequences."""
        return TOKENS // SEQLEN

    @property
    def heads(self) -> int:
        """Of queries, keys and values."""
        return WIDTH // self.head_dim

    @property
    def operations(self) -> float:
        """Of one call; half of the scores are masked."""
        return float(_PRODUCTS[self.direction] * 2 * TOKENS * SEQLEN * WIDTH // 2)


CELLS: Final = tuple(Cell(way, head_dim) for head_dim in (64, 128) for way in _PRODUCTS)


@dataclass(frozen=True)
class Result:
    """One cell: the candidate that served it, and TFLOP/s by contender."""

    cell: Cell
    candidate: str
    tflops: Mapping[str, float]
    failures: Mapping[str, str]  # contender -> why it has no rate


@dataclass(frozen=True)
class Record:
    """What was measured once on a GPU of this name: TFLOP/s by cell and contender."""

    gpu: str
    time: str
    torch: str
    driver: str
    cells: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Speed:
    """The check of one device; `why` says what kept it from being made."""

    device: int
    gpu: str | None
    results: tuple[Result, ...] = ()
    record: Record | None = None
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For doctor's document."""
        return {
            "device": self.device,
            "gpu": self.gpu,
            "why_not": self.why,
            "recorded": None if self.record is None else self._record(self.record),
            "cells": [self._cell(one) for one in self.results],
        }

    def recorded(self, result: Result) -> Mapping[str, float]:
        """What the record has for a cell."""
        return {} if self.record is None else self.record.cells.get(result.cell.name, {})

    def ratio(self, result: Result) -> float | None:
        """Flashvar's rate over the recorded one; None where one of them is not there."""
        recorded = self.recorded(result)
        if OURS not in recorded or OURS not in result.tflops:
            return None
        return result.tflops[OURS] / recorded[OURS]

    @staticmethod
    def _record(record: Record) -> dict[str, str]:
        return {key: value for key, value in vars(record).items() if key != "cells"}

    def _cell(self, result: Result) -> dict[str, Any]:
        return {
            "direction": result.cell.direction,
            "head_dim": result.cell.head_dim,
            "candidate": result.candidate,
            "tflops": dict(result.tflops),
            "recorded_tflops": dict(self.recorded(result)),
            "failures": dict(result.failures),
        }


def record_of(gpu: str) -> Record | None:
    """What the package has recorded for a GPU of this name."""
    found = json.loads(RECORDED.read_text(encoding="utf-8"))["gpus"].get(gpu)
    return None if found is None else Record(gpu, **found)
