"""Rates of an op's calls: a group of bars for each call, a bar for each contender."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any, Final

from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.drawing import style
from benchmarks.names import OF_OPS

# Contender -> whose color it has in the pictures of attention.
_COLORS: Final = {
    "flashvar": "flashvar-cuda",
    "copy": "sdpa-efficient",
    "fla": "sdpa-cudnn",
    "flash-qla": "flash-attn-4",
    "causal-conv1d": "flex",
    "torch": "sdpa-flash",
}


def draw(rows: Sequence[dict[str, Any]], *lines: str) -> Figure | None:
    """The picture of one op's rows of `run.py ops`; None where nothing in them was timed."""
    timed = [row for row in rows if "rate" in row and row["contender"] in _COLORS]
    if not timed:
        return None
    # Stable: within a direction the cells keep the benchmark's order.
    cells = sorted(dict.fromkeys(row["cell"] for row in timed), key=lambda cell: "backward" in cell)
    contenders = [one for one in _COLORS if any(row["contender"] == one for row in timed)]
    height = 0.8 / len(contenders)
    figure, axes = pyplot.subplots(figsize=(style.WIDTH, 0.17 * len(cells) * len(contenders) + 1.9))
    for contender in contenders:
        color, _ = style.STYLES[_COLORS[contender]]
        found = {row["cell"]: row["rate"] for row in timed if row["contender"] == contender}
        shift = (contenders.index(contender) - (len(contenders) - 1) / 2) * height
        bars = axes.barh(
            [cells.index(cell) + shift for cell in found], list(found.values()), 0.9 * height,
            label=OF_OPS[contender],
            color=color if style.is_ours(contender) else style.faded(color),
        )  # fmt: skip
        axes.bar_label(bars, fmt=lambda rate: f"{rate:.3g}", padding=2, fontsize=style.SMALL)
    axes.set_yticks(range(len(cells)), [_lines(cell) for cell in cells], linespacing=1.0)
    axes.set_xlabel(str(timed[0]["unit"]))
    axes.margins(x=0.12)
    axes.set_ylim(len(cells) - 0.5, -0.5)
    style.plain(axes, "x")
    top = style.entitle(figure, f"Rates of {timed[0]['op']}, {timed[0]['unit']}", *lines)
    figure.legend(
        frameon=False, fontsize=style.SMALL, ncols=len(contenders), loc="upper left",
        bbox_to_anchor=(0.04, top + 0.01),
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, top - 0.3 / figure.get_figheight()))
    return figure


def _lines(cell: str) -> str:
    """The name of a cell in short lines, which end at commas."""
    return fill(cell.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", "), 22)
