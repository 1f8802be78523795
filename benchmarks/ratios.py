"""What rates say of each other: ratios in one cell, geometric means over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean

from benchmarks.contenders import REFERENCE
from benchmarks.report import Row


def is_ours(contender: str) -> bool:
    """Whether a contender is one of flashvar's backends; the others are its peers."""
    return contender.startswith("flashvar-")


def to_peers(rates: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Each rate over the reference's (`to_reference`) and over the best peer's (`to_best`)."""
    peers = [rate for name, rate in rates.items() if not is_ours(name)]
    result: dict[str, dict[str, float]] = {name: {} for name in rates}
    for name, rate in rates.items():
        if REFERENCE in rates:
            result[name]["to_reference"] = rate / rates[REFERENCE]
        if peers:
            result[name]["to_best"] = rate / max(peers)
    return result


def by_cell(rows: Sequence[Row], direction: str, contender: str, peer: str) -> dict[str, float]:
    """Contender's rate over the peer's, in the cells of a direction that have both."""
    rates: dict[str, dict[str, float]] = {contender: {}, peer: {}}
    for row in rows:
        name, rate = row["contender"], row.get("tflops")
        if row["direction"] == direction and name in rates and isinstance(rate, float):
            rates[str(name)][str(row["cell"])] = rate
    common = [cell for cell in rates[contender] if cell in rates[peer]]
    return {cell: rates[contender][cell] / rates[peer][cell] for cell in common}


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Lines: direction, contender / peer, geometric mean, lowest ratio, its cell, cells."""
    names = list(dict.fromkeys(str(row["contender"]) for row in rows))
    directions = list(dict.fromkeys(str(row["direction"]) for row in rows))
    lines = []
    for direction in directions:
        for contender in filter(is_ours, names):
            for peer in names:
                if peer == contender or not (found := by_cell(rows, direction, contender, peer)):
                    continue
                lowest = min(found, key=lambda cell: found[cell])
                lines.append(
                    (
                        f"{direction} {contender} / {peer}",
                        f"{geometric_mean(found.values()):.3f}",
                        f"{found[lowest]:.3f}",
                        lowest,
                        str(len(found)),
                    )
                )
    head = ("geometric mean of ratios", "mean", "lowest", "in", "cells")
    return [head, *lines] if lines else []
