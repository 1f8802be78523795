"""Every op's own cells, those of `doctor --bench` and larger ones, beside its peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from benchmarks import timing
from benchmarks.report import Options, Report, Row, chosen, reason
from flashvar.cli.speed import OURS, Call, Cell, OpSpeed, timed_ops


def run(options: Options) -> Report:
    """Rates of every cell in 10^12 of its work a second, and flashvar's ratio to each peer.

    A cell is named by its op, or that function of it, and its own name.
    """
    cells = {
        f"{name}: {cell.name}": (name, op, cell)
        for name, op in timed_ops().items()
        for cell in (*op.CELLS, *op.MORE_CELLS)
    }
    known = tuple(dict.fromkeys(peer for _, op, _ in cells.values() for peer in (OURS, *op.PEERS)))
    wanted = chosen(known, options.contenders, option="--contender")
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    for label in chosen(tuple(cells), options.only):
        found = _cell(*cells[label], wanted, options.seconds)
        rows += found
        lines += [_line(row) for row in found if "skipped" not in row]
    return Report(rows=rows, columns=_COLUMNS, lines=lines)


_COLUMNS: Final = ("cell", "contender", "ms", "10^12 a second", "flashvar's to it")


def current_device() -> torch.device:
    """The CUDA device that is timed."""
    return torch.device("cuda", torch.cuda.current_device())


def _cell(name: str, op: OpSpeed, cell: Cell, wanted: Sequence[str], seconds: float) -> list[Row]:
    device = current_device()
    unit = op.TITLE.rpartition(", ")[2]
    row: Row = {"op": name, "unit": unit, "cell": cell.name}
    calls: dict[str, Call] = {}
    skipped: list[Row] = []
    for contender in (one for one in (OURS, *op.PEERS) if one in wanted):
        try:
            call = op.call(cell, contender, device)
            call()
            calls[contender] = call
        except Exception as error:  # what a contender does not serve is an answer
            skipped.append({**row, "contender": contender, "skipped": reason(error)})
    measured = timing.measure(calls, seconds=seconds)
    ours = measured.timings.get(OURS)
    rows: list[Row] = []
    for contender, spent in measured.timings.items():
        rows.append(
            {
                **row,
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
