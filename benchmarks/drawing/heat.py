"""Ratios as heat maps: lengths across, head dims and masks down; blue is faster, red slower.

A row has so few maps that its text stays legible on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Final

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drawing import style
from benchmarks.drawing.points import MASKS, Point, length, mean

# What a map says above itself, and its ratios.
Map = tuple[str, dict[Point, float]]
_SPAN: Final = 1.3  # the darkest colors: about 2.5 times and 0.4 times as fast
_DARK: Final = 0.6  # from here on white text is easier to read
_ACROSS: Final = 3


def draw(strips: Sequence[tuple[str, Sequence[Map]]], title: str, *lines: str) -> Figure:
    """Rows of maps that share their places; a map without ratios stays empty."""
    points = {p for _, maps in strips for _, found in maps for p in found}
    rows = sorted({(p.head_dim, p.causal) for p in points})
    lengths = sorted({p.seqlen for p in points})
    strips = [(name, part) for name, maps in strips for part in _parts(maps)]
    across = max(len(maps) for _, maps in strips)
    figure, panels = pyplot.subplots(
        *(len(strips), across),
        figsize=(style.WIDTH, 1.0 + len(strips) * (0.2 * len(rows) + 0.75)),
        squeeze=False,
    )  # fmt: skip
    for y, (name, maps) in enumerate(strips):
        for x in range(across):
            if x >= len(maps):
                panels[y][x].set_visible(False)
                continue
            _draw_map(panels[y][x], maps[x], rows, lengths)
            if x == 0:
                labels = [f"{dim}, {MASKS[causal]}" for dim, causal in rows]
                panels[y][x].set_yticks(range(len(rows)), labels, fontsize=style.SMALL)
                panels[y][x].set_ylabel(name, fontsize=10, weight="bold")
    top = style.entitle(figure, title, *lines)
    figure.tight_layout(rect=(0, 0, 1, top), w_pad=0.6, h_pad=1.0)
    return figure


def _parts(maps: Sequence[Map]) -> list[Sequence[Map]]:
    """The maps in rows of about the same length."""
    rows = max(-(-len(maps) // _ACROSS), 1)
    size = max(-(-len(maps) // rows), 1)
    return [maps[start : start + size] for start in range(0, rows * size, size)]


def _draw_map(panel: Axes, one: Map, rows: list[tuple[int, bool]], lengths: list[int]) -> None:
    name, found = one
    ratios = [
        [found.get(Point(dim, causal, seqlen), float("nan")) for seqlen in lengths]
        for dim, causal in rows
    ]
    panel.imshow(
        [[log2(ratio) for ratio in row] for row in ratios],
        cmap="RdBu", vmin=-_SPAN, vmax=_SPAN, aspect="auto",
    )  # fmt: skip
    for y, row in enumerate(ratios):
        for x, ratio in enumerate(row):
            if ratio == ratio:
                color = "white" if abs(log2(ratio)) > _DARK * _SPAN else "#222222"
                said = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"
                panel.text(
                    x, y, said, ha="center", va="center_baseline", color=color, fontsize=style.SMALL
                )
    for y, (dim, _) in enumerate(rows[1:], start=1):
        if dim != rows[y - 1][0]:
            panel.axhline(y - 0.5, color="white", linewidth=3)
    panel.set_title(name, fontsize=style.SMALL)
    panel.set_yticks([])
    panel.set_xticks(range(len(lengths)), [length(one) for one in lengths], fontsize=style.SMALL)
    if found:
        panel.set_xlabel(f"mean {mean(found):.2f}", fontsize=style.SMALL)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
