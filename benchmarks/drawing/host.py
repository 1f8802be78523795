"""Host time of one small call: bars, grouped by what the call has to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.drawing import style

_WAYS: Final = {
    "eager": "forward,\nno gradient",
    "dispatcher": "the same, through\ntorch's dispatcher alone",
    "gradient": "forward, inputs that\nrequire gradients",
    "step": "forward\nand backward",
}
# Who is timed here is named without a backend where it is CUDA.
_CALLERS: Final = {
    "flashvar": "flashvar-cuda",
    "flashvar-triton": "flashvar-triton",
    "sdpa-flash": "sdpa-flash",
    "sdpa-cudnn": "sdpa-cudnn",
}


def draw(rows: Sequence[dict[str, Any]], *lines: str) -> Figure | None:
    """The picture of the rows of `run.py host`; None where there is nothing in it."""
    found = {
        (caller, way): row
        for row in rows
        if "median_us" in row
        for caller, _, way in [row["contender"].rpartition("-")]
        if caller in _CALLERS and way in _WAYS
    }
    ways = [way for way in _WAYS if any(key[1] == way for key in found)]
    callers = [caller for caller in _CALLERS if any(key[0] == caller for key in found)]
    if not found:
        return None
    figure, axes = pyplot.subplots(figsize=(max(2.4 * len(ways) + 1.2, 7.2), 4.6))
    width = 0.8 / len(callers)
    highest = max(row["high_us"] for row in found.values())
    for index, caller in enumerate(callers):
        label, colour, _ = style.STYLES[_CALLERS[caller]]
        for group, way in enumerate(ways):
            if (row := found.get((caller, way))) is None:
                continue
            x = group + (index - (len(callers) - 1) / 2) * width
            median, low, high = row["median_us"], row["low_us"], row["high_us"]
            axes.bar(
                x, median, 0.9 * width, color=colour, alpha=1 if style.is_ours(caller) else 0.55,
                label=label,
            )  # fmt: skip
            axes.plot([x, x], [low, high], color="#222222", linewidth=1.2)
            axes.text(
                x, high + 0.012 * highest, f"{median:.1f}", ha="center", va="bottom", fontsize=8.5
            )
    axes.set_xticks(range(len(ways)), [_WAYS[way] for way in ways])
    axes.set_ylabel("µs of host time a call")
    style.plain(axes)
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.02)
    axes.set_ylim(0, 1.1 * highest)
    known = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(known.values(), known, frameon=False, fontsize=9, loc="upper left")
    top = style.entitle(figure, "What one small attention call costs the host", *lines)
    figure.tight_layout(rect=(0, 0, 1, top))
    return figure
