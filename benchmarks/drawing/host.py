"""Host time of one small call: bars, grouped by what the call has to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib import pyplot
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drawing import style
from benchmarks.names import HOST_CALLERS, HOST_WAYS


def draw(rows: Sequence[dict[str, Any]], *lines: str) -> Figure | None:
    """The picture of the rows of `run.py host`; None where there is nothing in it."""
    found = {
        (caller, way): row
        for row in rows
        if "median_us" in row
        for caller, _, way in [row["contender"].rpartition("-")]
        if caller in HOST_CALLERS and way in HOST_WAYS
    }
    if not found:
        return None
    present = {way for _, way in found}
    # A step costs so much more that it would flatten the others: it has a scale of its own.
    groups = [
        [way for way in HOST_WAYS if way in present and (way == "step") == own] for own in (0, 1)
    ]
    groups = [group for group in groups if group]
    figure, panels = pyplot.subplots(
        *(len(groups), 1),
        figsize=(style.WIDTH, 0.85 * len(present) + 2.0),
        height_ratios=[len(group) for group in groups],
        squeeze=False,
    )
    for panel, group in zip(panels.flat, groups, strict=True):
        _draw_group(panel, group, found)
    panels[-1][0].set_xlabel("CPU time per call, µs", fontsize=style.SMALL)
    known: dict[str, Artist] = {}
    for panel in panels.flat:
        bars, names = panel.get_legend_handles_labels()
        known |= dict(zip(names, bars, strict=True))
    top = style.entitle(figure, "CPU time of one small attention call", *lines)
    figure.legend(
        list(known.values()), list(known), frameon=False, fontsize=style.SMALL, ncols=2,
        loc="upper left", bbox_to_anchor=(0.02, top + 0.01),
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, top - 0.45 / figure.get_figheight()))
    return figure


def _draw_group(
    panel: Axes, ways: Sequence[str], found: Mapping[tuple[str, str], dict[str, Any]]
) -> None:
    callers = [caller for caller in HOST_CALLERS if any(key[0] == caller for key in found)]
    width = 0.8 / len(callers)
    highest = max(row["high_us"] for (_, way), row in found.items() if way in ways)
    for (caller, way), row in found.items():
        if way not in ways:
            continue
        contender = HOST_CALLERS[caller]
        color, _ = style.STYLES[contender]
        y = ways.index(way) + (callers.index(caller) - (len(callers) - 1) / 2) * width
        median, low, high = row["median_us"], row["low_us"], row["high_us"]
        panel.barh(
            y, median, 0.9 * width, label=style.label(contender),
            color=color if style.is_ours(caller) else style.faded(color),
        )  # fmt: skip
        panel.plot([low, high], [y, y], color="#222222", linewidth=1.2)
        panel.text(high + 0.015 * highest, y, f"{median:.1f}", va="center", fontsize=style.SMALL)
    panel.set_yticks(range(len(ways)), [fill(HOST_WAYS[way], 17) for way in ways])
    style.plain(panel, "x")
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(len(ways) - 0.5, -0.5)
    panel.set_xlim(0, 1.16 * highest)
