"""Every op's own cells, those of `doctor --bench`, longer and beside its peers."""

from __future__ import annotations

from typing import Final

import torch

from benchmarks import timing
from benchmarks.report import Options, Report, Row, chosen, reason
from flashvar.cli.speed import OURS, Call, Cell, OpSpeed, timed_ops


def run(options: Options) -> Report:
    """Rates of every cell in 10^12 of its work a second, and flashvar's ratio to each peer."""
    cells = {cell.name: (name, op, cell) for name, op in timed_ops().items() for cell in op.CELLS}
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    for label in chosen(tuple(cells), options.only):
        found = _cell(*cells[label], options.seconds)
        rows += found
        lines += [_line(row) for row in found if "skipped" not in row]
    return Report(rows=rows, columns=_COLUMNS, lines=lines)


_COLUMNS: Final = ("cell", "contender", "ms", "10^12 a second", "flashvar's to it")


def _cell(name: str, op: OpSpeed, cell: Cell, seconds: float) -> list[Row]:
    device = torch.device("cuda", torch.cuda.current_device())
    calls: dict[str, Call] = {}
    skipped: list[Row] = []
    for contender in (OURS, *op.PEERS):
        try:
            call = op.call(cell, contender, device)
            call()
            calls[contender] = call
        except Exception as error:  # what a contender does not serve is an answer
            row: Row = {"op": name, "cell": cell.name, "contender": contender}
            skipped.append({**row, "skipped": reason(error)})
    measured = timing.measure(calls, seconds=seconds)
    ours = measured.timings.get(OURS)
    rows: list[Row] = []
    for contender, spent in measured.timings.items():
        rows.append(
            {
                "op": name,
                "cell": cell.name,
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
