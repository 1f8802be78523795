"""Rates of the attention benchmark by contender and place in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any, Final, TypeAlias

from benchmarks.drawing.style import STYLES
from benchmarks.ratios import is_peer

MASKS: Final = {False: "no mask", True: "causal"}


@dataclass(frozen=True, order=True)
class Point:
    """A place in the pictures."""

    head_dim: int
    causal: bool
    seqlen: int


Rates: TypeAlias = dict[str, dict[Point, float]]


def rates(rows: Sequence[dict[str, Any]], direction: str) -> Rates:
    """TFLOP/s by contender and point, in the order of the styles."""
    found: Rates = {name: {} for name in STYLES}
    for row in rows:
        if row["direction"] == direction and "tflops" in row and row["contender"] in found:
            point = Point(row["head_dim"], row["causal"], row["seqlen"])
            found[row["contender"]][point] = row["tflops"]
    return {name: by_point for name, by_point in found.items() if by_point}


def best_peer(measured: Rates) -> dict[Point, float]:
    """The fastest of the peers at each point: of those that are exact."""
    peers = [found for name, found in measured.items() if is_peer(name)]
    points = {point for found in peers for point in found}
    return {point: max(found[point] for found in peers if point in found) for point in points}


def over(ours: dict[Point, float], theirs: dict[Point, float]) -> dict[Point, float]:
    """Ratios at the points that both have."""
    return {point: ours[point] / theirs[point] for point in sorted(ours) if point in theirs}


def mean(ratios: dict[Point, float]) -> float:
    """The geometric mean of some ratios."""
    return geometric_mean(ratios.values())


def length(seqlen: int) -> str:
    """A length as people say it."""
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)
