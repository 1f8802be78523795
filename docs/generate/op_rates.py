"""Rates of an op's calls, from the records of `run.py ops`: none of them is typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.names import OF_OPS
from rates import NONE, RESULTS, caption, day_and_commit, documents, relative
from tables import table

OURS: Final = "flashvar"
# In headings, for tables that fit a page.
_SHORT: Final = {"fla": "FLA"}


def of_op(name: str) -> Callable[[Path], str]:
    """What makes the tables of an op, or of one function of it: one per record that has it."""

    def made(root: Path) -> str:
        found = list(_tables(root, name))
        return "\n\n".join(found) or f"No record in `{RESULTS}` has it yet."

    return made


def linear_attention_to_peers(root: Path) -> str:
    """README.md's table: the rate of gated_delta_rule relative to that of each other package."""
    cells: dict[str, dict[str, float]] = {}
    for _, document in documents(root, "ops"):
        for row in document["rows"]:
            if row["op"] == "gated_delta_rule" and "rate" in row:
                cells.setdefault(row["cell"], {})[row["contender"]] = row["rate"]
    peers = dict.fromkeys(peer for by in cells.values() for peer in by if peer != OURS)
    of_call = {
        f"{direction}, vs {_name(peer)}": [
            by[OURS] / by[peer]
            for cell, by in cells.items()
            if cell.startswith(direction) and OURS in by and peer in by
        ]
        for direction in ("forward", "backward")
        for peer in peers
    }
    return relative(of_call)


def of_linear_attention(root: Path) -> str:
    """README.md's words on the runs that this table is of."""
    return "; ".join(
        day_and_commit(file, document["environment"])
        for file, document in documents(root, "ops")
        if any(row["op"] == "gated_delta_rule" for row in document["rows"])
    )


def ratios_of_linear_attention(root: Path) -> str:
    """That table under a caption."""
    return f"Measured {of_linear_attention(root)}.\n\n{linear_attention_to_peers(root)}"


def _tables(root: Path, name: str) -> Iterator[str]:
    for file, document in documents(root, "ops"):
        rows = [row for row in document["rows"] if row["op"] == name and "rate" in row]
        if not rows:
            continue
        units = " and ".join(dict.fromkeys(row["unit"] for row in rows))
        yield f"{caption(file, document['environment'], units)}\n\n{_table(rows)}"


def _table(rows: list[dict[str, Any]]) -> str:
    """A line per cell, a column per contender, and flashvar's ratios to each of them."""
    cells: dict[str, dict[str, float]] = {}
    for row in rows:
        cells.setdefault(row["cell"], {})[row["contender"]] = row["rate"]
    peers = [one for one in dict.fromkeys(row["contender"] for row in rows) if one != OURS]
    names = [_SHORT.get(peer, _name(peer)) for peer in peers]
    heading = ("call", OURS, *names, *(f"vs {name}" for name in names))
    lines = [
        (
            cell,
            f"**{_rate(by[OURS])}**",
            *(_rate(by[peer]) if peer in by else NONE for peer in peers),
            *(f"{by[OURS] / by[peer]:.2f}" if peer in by else NONE for peer in peers),
        )
        for cell, by in cells.items()
        if OURS in by
    ]
    return table(heading, lines)


def _rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2f}"


def _name(contender: str) -> str:
    return OF_OPS.get(contender, f"`{contender}`")
