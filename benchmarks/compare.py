"""What changed between two files of one benchmark: ratios of B to A, and what got worse.

The files are run.py's. Rows are matched by what they measured; those that only one file has, or
that only one could run, are listed and are no regression by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

from benchmarks import result_file
from benchmarks.report import SCHEMA, BenchmarkError, aligned

_RATE: Final = "tflops"
# Which number of a row counts; less is better in all of them but the rate.
_NUMBERS: Final = (_RATE, "median_us", "median_ms", "median_s", "seconds", "bytes")
# What of a row says what was measured.
_NAMES: Final = (
    *("cell", "shape", "way", "step", "statement", "case"),
    *("distribution", "platform", "contender"),
)
# What both runs should have in common, by its place in the file.
_COMMON: Final = {
    "GPU": ("environment", "device", "name"),
    "driver": ("environment", "device", "driver"),
    "CPU": ("environment", "cpu", "model"),
    "Python": ("environment", "python"),
    "torch": ("environment", "versions", "torch"),
    "Triton": ("environment", "versions", "triton"),
    "settings": ("environment", "settings"),
}


@dataclass(frozen=True)
class Change:
    """One measurement in both files; None where a file lacks it."""

    name: str
    unit: str
    before: float | None
    after: float | None

    @property
    def better(self) -> float | None:
        """How many times better B is: above 1 faster or smaller, below 1 worse."""
        if not self.before or not self.after:
            return None
        ratio = self.after / self.before
        return ratio if self.unit == _RATE else 1 / ratio


def documents(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """The changes from one file to another, in the order of the second.

    Raises:
        BenchmarkError: they are of different benchmarks.
    """
    if before["benchmark"] != after["benchmark"]:
        raise BenchmarkError(
            f"expected two files of {before['benchmark']!r}, the second is of "
            f"{after['benchmark']!r}: compare files of one benchmark"
        )
    return changes(before["rows"], after["rows"])


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What of the machines is not the same, a line each: a ratio may be theirs."""
    found = []
    for name, path in _COMMON.items():
        first, second = _at(before, path), _at(after, path)
        if first != second:
            found.append(f"not the same {name}: {first or '-'} in A, {second or '-'} in B")
    return found


def changes(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[Change]:
    """The changes from one run's rows to another's, in the order of the second."""
    first, second = _numbers(before), _numbers(after)
    return [
        Change(name, unit, first.get((name, unit)), second.get((name, unit)))
        for name, unit in dict.fromkeys([*second, *first])
    ]


def regressions(compared: Sequence[Change], threshold: float) -> list[Change]:
    """Those where B is worse than A by more than the threshold, a part of A."""
    return [
        change for change in compared if change.better is not None and change.better < 1 - threshold
    ]


def table(compared: Sequence[Change], threshold: float) -> str:
    """Lines: name, A, B, how many times better, a mark where worse; last, the mean."""
    worse = regressions(compared, threshold)
    lines = [
        (
            change.name,
            _shown(change.before, change.unit),
            _shown(change.after, change.unit),
            "-" if change.better is None else f"{change.better:.3f}",
            "WORSE" if change in worse else "",
        )
        for change in compared
    ]
    ratios = [change.better for change in compared if change.better is not None]
    mean = f"{geometric_mean(ratios):.3f}" if ratios else "-"
    return "\n".join(
        [
            aligned([("(above 1: B is better)", "A", "B", "ratio", ""), *lines]),
            "",
            f"geometric mean {mean} of {len(ratios)}; worse by more than {threshold:.0%}: "
            f"{len(worse)}; in one file only: {len(compared) - len(ratios)}",
        ]
    )


def read(path: Path) -> dict[str, Any]:
    """What run.py wrote.

    Raises:
        BenchmarkError: there is no such file, or it is not of this runner.
    """
    try:
        document = result_file.read(path)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"expected a file of --json at {path}, found: {error}") from None
    if document.get("schema") != SCHEMA:
        raise BenchmarkError(
            f"expected schema {SCHEMA} in {path}, found something else: write it with --json"
        )
    return document


def _at(document: dict[str, Any], path: Sequence[str]) -> Any:
    found: Any = document
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _numbers(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """The number of each row, by name and unit; rows without one are left out."""
    found = {}
    for row in rows:
        unit = next((one for one in _NUMBERS if isinstance(row.get(one), int | float)), None)
        if unit is not None:
            # A wheel's name has its version: only where nothing else names it.
            parts = [row[part] for part in _NAMES if part in row] or [row.get("wheel")]
            name = " ".join(map(str, parts))
            found[name, unit] = float(row[unit])
    return found


def _shown(number: float | None, unit: str) -> str:
    words = {"tflops": "TFLOP/s", "seconds": "s", "bytes": "B"}
    if number is None:
        return "-"
    text = f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"
    return f"{text} {words.get(unit, unit.removeprefix('median_'))}"
