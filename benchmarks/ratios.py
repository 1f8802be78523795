"""What rates say of each other: ratios in one cell, geometric means over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Final

from benchmarks.report import Row

REFERENCE: Final = "sdpa-flash"
_ANCHOR: Final = "sdpa-cudnn"  # whose rate in the same run the cells' goals are multiples of


def is_ours(contender: str) -> bool:
    """Whether a contender is one of flashvar's backends; the others are its peers."""
    return contender.startswith("flashvar-")


def to_peers(rates: Mapping[str, float], goal: float | None = None) -> dict[str, dict[str, float]]:
    """Each rate over the reference's (`to_reference`) and over the best peer's (`to_best`).

    With a goal and cuDNN among the rates also the figure to beat (`goal_tflops`), and the rate over
    that (`to_goal`).
    """
    peers = [rate for name, rate in rates.items() if not is_ours(name)]
    result: dict[str, dict[str, float]] = {name: {} for name in rates}
    for name, rate in rates.items():
        if REFERENCE in rates:
            result[name]["to_reference"] = rate / rates[REFERENCE]
        if peers:
            result[name]["to_best"] = rate / max(peers)
        if goal is not None and _ANCHOR in rates:
            result[name]["goal_tflops"] = goal * rates[_ANCHOR]
            result[name]["to_goal"] = rate / (goal * rates[_ANCHOR])
    return result


def by_cell(rows: Sequence[Row], direction: str, contender: str, peer: str) -> dict[str, float]:
    """Contender's rate over the peer's, in the cells of a direction that have both."""
    rates = {name: _column(rows, direction, name, "tflops") for name in (contender, peer)}
    common = [cell for cell in rates[contender] if cell in rates[peer]]
    return {cell: rates[contender][cell] / rates[peer][cell] for cell in common}


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Lines: direction, contender / peer, geometric mean, lowest ratio, its cell, cells."""
    lines = [
        (f"{direction} {contender} / {peer}", *_mean_and_lowest(found))
        for direction in _directions(rows)
        for contender in filter(is_ours, _contenders(rows))
        for peer in _contenders(rows)
        if not is_ours(peer) and (found := by_cell(rows, direction, contender, peer))
    ]
    for contender in filter(is_ours, _contenders(rows)):
        ours = _column(rows, None, contender, "tflops")
        products = _column(rows, None, contender, "product_tflops")
        if found := {cell: ours[cell] / product for cell, product in products.items()}:
            lines.append((f"{contender} / matrix product", *_mean_and_lowest(found)))
    head = ("geometric mean of ratios", "mean", "lowest", "in", "cells")
    return [head, *lines] if lines else []


def to_goals(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Lines: a cell's figure to beat, and our rates over it; last, their geometric means."""
    ours = [name for name in _contenders(rows) if is_ours(name)]
    ratios = {name: _column(rows, None, name, "to_goal") for name in ours}
    ours = [name for name in ours if ratios[name]]
    goals = {
        str(row["cell"]): goal for row in rows if isinstance(goal := row.get("goal_tflops"), float)
    }
    if not ours:
        return []
    lines = [
        (cell, f"{goal:.0f}", *(_shown(ratios[name].get(cell)) for name in ours))
        for cell, goal in goals.items()
    ]
    means = []
    for direction in _directions(rows):
        found = [list(_column(rows, direction, name, "to_goal").values()) for name in ours]
        if any(found):
            shown = (_shown(geometric_mean(one) if one else None) for one in found)
            means.append((f"geometric mean, {direction}", "", *shown))
    return [("rate / figure to beat (cuDNN here x goal)", "TFLOP/s", *ours), *lines, *means]


def _contenders(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["contender"]) for row in rows))


def _directions(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["direction"]) for row in rows))


def _column(
    rows: Sequence[Row], direction: str | None, contender: str, column: str
) -> dict[str, float]:
    """A contender's numbers by cell, in one direction or in all."""
    return {
        str(row["cell"]): value
        for row in rows
        if row["contender"] == contender and direction in (None, row["direction"])
        if isinstance(value := row.get(column), float)
    }


def _mean_and_lowest(found: Mapping[str, float]) -> tuple[str, ...]:
    lowest = min(found, key=lambda cell: found[cell])
    return (
        f"{geometric_mean(found.values()):.3f}",
        f"{found[lowest]:.3f}",
        lowest,
        str(len(found)),
    )


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
