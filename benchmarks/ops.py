"""Every op's own cells, those of `doctor --bench` and larger ones, beside its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Final, TypeAlias

import torch

from benchmarks import timing, worker_pool
from benchmarks.report import Options, Report, Row, chosen, reason
from flashvar.cli.speed import OURS, Call, Cell, OpSpeed, timed_ops

Case: TypeAlias = tuple[str, OpSpeed, Cell]  # the op's name first


def run(options: Options) -> Report:
    """Rates of every cell in 10^12 of its work a second, and flashvar's ratio to each peer.

    A cell is named by its op, or that function of it, and its own name.
    """
    cases = _cases()
    known = tuple(dict.fromkeys(peer for _, op, _ in cases.values() for peer in (OURS, *op.PEERS)))
    wanted = chosen(known, options.contenders, option="--contender")
    names = chosen(tuple(cases), options.only)
    if options.processes:
        # Contenders keep what they compile and tune on disk. Each works for minutes on some cells,
        # so they are prepared apart.
        tasks = [
            (name, one) for one in wanted for name in names if one in (OURS, *cases[name][1].PEERS)
        ]
        worker_pool.fill(tasks, options.processes, _fill)
    rows = worker_pool.run(
        names,
        0,
        prepare=partial(_prepare, wanted),
        measure=partial(_measure, wanted, options.seconds),
        lost=partial(_lost, wanted),
    )
    lines = [_line(row) for row in rows if "skipped" not in row]
    return Report(rows=rows, columns=_COLUMNS, lines=lines)


@cache
def _cases() -> Mapping[str, Case]:
    """All cases by name. Each process makes them: modules, which ops are, cannot be sent."""
    return {
        f"{name}: {cell.name}": (name, op, cell)
        for name, op in timed_ops().items()
        for cell in (*op.CELLS, *op.MORE_CELLS)
    }


_COLUMNS: Final = ("cell", "contender", "ms", "10^12 a second", "flashvar's to it")


def current_device() -> torch.device:
    """The CUDA device that is timed."""
    return torch.device("cuda", torch.cuda.current_device())


def _fill(tasks: Sequence[tuple[str, str]]) -> None:
    """Have contenders compile and tune what they need for cases, and keep no tensors."""
    for name, contender in tasks:
        # Who measures has the memory alone.
        with suppress(torch.cuda.OutOfMemoryError):
            _prepare([contender], [name])


def _prepare(wanted: Sequence[str], names: Sequence[str]) -> None:
    """Have every contender compile and tune what it needs in this process, and keep no tensors."""
    for name in names:
        _ready(_cases()[name], wanted)
        torch.cuda.empty_cache()  # other processes need the memory


def _ready(case: Case, wanted: Sequence[str]) -> tuple[dict[str, Call], list[Row]]:
    """The calls of those who run a cell, each called once, and rows of those who do not."""
    _, op, cell = case
    calls: dict[str, Call] = {}
    skipped: list[Row] = []
    for contender in (one for one in (OURS, *op.PEERS) if one in wanted):
        try:
            call = op.call(cell, contender, current_device())
            call()
            calls[contender] = call
        except torch.cuda.OutOfMemoryError:
            raise  # says nothing of the contender: the case is lost
        except Exception as error:  # what a contender does not run is an answer
            skipped.append({**_described(case), "contender": contender, "skipped": reason(error)})
    return calls, skipped


def _described(case: Case) -> Row:
    name, op, cell = case
    return {"op": name, "unit": op.TITLE.rpartition(", ")[2], "cell": cell.name}


def _lost(wanted: Sequence[str], name: str, why: str) -> list[Row]:
    case = _cases()[name]
    who = [one for one in (OURS, *case[1].PEERS) if one in wanted]
    return [{**_described(case), "contender": one, "skipped": why} for one in who]


def _measure(wanted: Sequence[str], seconds: float, name: str) -> list[Row]:
    rows = _timed(_cases()[name], wanted, seconds)
    torch.cuda.empty_cache()
    return rows


def _timed(case: Case, wanted: Sequence[str], seconds: float) -> list[Row]:
    cell = case[2]
    calls, skipped = _ready(case, wanted)
    measured = timing.measure(calls, seconds=seconds)
    ours = measured.timings.get(OURS)
    rows: list[Row] = []
    for contender, spent in measured.timings.items():
        rows.append(
            {
                **_described(case),
                "contender": contender,
                "dtype": cell.dtype,
                "median_ms": spent.median_ms,
                "low_ms": spent.low_ms,
                "high_ms": spent.high_ms,
                "rounds": spent.rounds,
                "rate": cell.work / spent.median_ms / 1e9,
                "to_contender": None if ours is None else spent.median_ms / ours.median_ms,
                **measured.clocks,
            }
        )
    return rows + skipped


def _line(row: Row) -> tuple[str, ...]:
    ratio = row["to_contender"]
    return (
        str(row["cell"]),
        str(row["contender"]),
        f"{row['median_ms']:.3f}",
        f"{row['rate']:.2f}",
        "" if ratio is None else f"{ratio:.2f}",
    )
