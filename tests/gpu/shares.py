"""Divides the GPU tests among processes, in shares that take equally long by the last records.

Tests of the same kernels stay together, so that Triton compiles a kernel in one process only. The
last share has the tests marked `large`, which need most of a device's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import result_file

_RESULTS = Path(__file__).parent / "results"
_UNKNOWN_SECONDS = 3.0  # for a case that no record has: it may compile
_QUICK_SECONDS = 0.2  # for a case that a record has without its seconds


def seconds_before(folder: Path = _RESULTS) -> dict[str, float]:
    """The longest that each case took in any record."""
    found: dict[str, float] = {}
    for path in sorted(folder.glob("*.json")):
        for case in result_file.read(path).get("cases", ()):
            if "case" in case:
                name = case["case"]
                found[name] = max(case.get("seconds", _QUICK_SECONDS), found.get(name, 0.0))
    return found


def shares(
    groups: Mapping[str, Iterable[str]], seconds: Mapping[str, float], count: int
) -> dict[str, int]:
    """The share, from 0, of each group of cases: the longest first, each to the shortest share."""
    total = [0.0] * count
    found = {}
    cost = {
        name: sum(seconds.get(case, _UNKNOWN_SECONDS) for case in cases)
        for name, cases in groups.items()
    }
    for name in sorted(cost, key=lambda name: (-cost[name], name)):
        found[name] = total.index(min(total))
        total[found[name]] += cost[name]
    return found
