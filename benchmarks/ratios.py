"""What rates say of each other: ratios in one cell, geometric means over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Final

from benchmarks.report import Row

REFERENCE: Final = "sdpa-flash"
# Contenders that compute with fewer bits than they are given, and what they do, in words.
APPROXIMATE: Final = {"sageattention": "rounds q and k to INT8"}


def is_ours(contender: str) -> bool:
    """Whether a contender is one of flashvar's backends."""
    return contender.startswith("flashvar-")


def is_peer(contender: str) -> bool:
    """Whether it computes the same as flashvar: no other can be the fastest peer of a cell."""
    return not is_ours(contender) and contender not in APPROXIMATE


def marked(contender: str) -> str:
    """Its name in the tables of a run, which say who is approximate."""
    return f"{contender} (approximate)" if contender in APPROXIMATE else contender


def to_peers(rates: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Each rate over the reference's (`to_reference`) and over the best peer's (`to_best`)."""
    peers = [rate for name, rate in rates.items() if is_peer(name)]
    result: dict[str, dict[str, float]] = {name: {} for name in rates}
    for name, rate in rates.items():
        if REFERENCE in rates:
            result[name]["to_reference"] = rate / rates[REFERENCE]
        if peers:
            result[name]["to_best"] = rate / max(peers)
    return result


def by_cell(rows: Sequence[Row], direction: str, contender: str, peer: str) -> dict[str, float]:
    """Contender's rate over the peer's, in the cells of a direction that have both."""
    rates = {name: _column(rows, direction, name, "tflops") for name in (contender, peer)}
    common = [cell for cell in rates[contender] if cell in rates[peer]]
    return {cell: rates[contender][cell] / rates[peer][cell] for cell in common}


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Lines: direction, contender / peer, geometric mean, lowest ratio, its cell, cells."""
    lines = [
        (f"{direction} {contender} / {marked(peer)}", *_mean_and_lowest(found))
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


def to_best_peers(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Lines: a cell's fastest peer, and our rates over it; last, their geometric means."""
    best: dict[str, Row] = {}
    for row in rows:
        if "tflops" in row and is_peer(str(row["contender"])):
            cell = str(row["cell"])
            best[cell] = max(row, best.get(cell, row), key=lambda one: float(one["tflops"]))
    ours = [name for name in _contenders(rows) if is_ours(name)]
    ratios = {name: _column(rows, None, name, "to_best") for name in ours}
    ours = [name for name in ours if ratios[name]]
    if not ours:
        return []
    lines = [
        (
            *(cell, str(row["contender"]), f"{row['tflops']:.0f}"),
            *(_shown(ratios[name].get(cell)) for name in ours),
        )
        for cell, row in best.items()
    ]
    means = []
    for direction in _directions(rows):
        found = [list(_column(rows, direction, name, "to_best").values()) for name in ours]
        if any(found):
            shown = (_shown(geometric_mean(one) if one else None) for one in found)
            means.append((f"geometric mean, {direction}", "", "", *shown))
    return [("rate / the fastest peer's", "peer", "TFLOP/s", *ours), *lines, *means]


def differences(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Lines: an approximate contender, how far its results are from the reference's, cells."""
    found = {
        name: list(_column(rows, None, name, "difference_to_reference").values())
        for name in _contenders(rows)
        if name in APPROXIMATE
    }
    lines = [
        (marked(name), f"{min(one):.4f}", f"{max(one):.4f}", str(len(one)))
        for name, one in found.items()
        if one
    ]
    head = ("difference to the reference", "lowest", "highest", "cells")
    return [head, *lines] if lines else []


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
