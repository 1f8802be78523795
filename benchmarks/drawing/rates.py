"""TFLOP/s by length: a panel for each head dim, a line for each contender."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drawing import style
from benchmarks.drawing.points import MASKS, Rates, length

# A row of panels: what it says at its left, its rates, and which mask.
Strip = tuple[str, Rates, bool]


def by_mask(measured: Rates) -> list[Strip]:
    """A row of panels for each mask of one direction."""
    masks = sorted({point.causal for found in measured.values() for point in found})
    return [(MASKS[causal], measured, causal) for causal in masks]


def draw(strips: Sequence[Strip], title: str, *lines: str) -> Figure:
    """The picture of some rows of panels."""
    head_dims = sorted(
        {p.head_dim for _, measured, _ in strips for f in measured.values() for p in f}
    )
    figure, panels = pyplot.subplots(
        *(len(strips), len(head_dims)),
        figsize=(style.WIDTH, 1.75 * len(strips) + 1.9),
        sharey=True,
        squeeze=False,
    )
    for row, (name, measured, causal) in enumerate(strips):
        for column, head_dim in enumerate(head_dims):
            _draw_panel(panels[row][column], measured, head_dim, causal)
        panels[row][0].set_ylabel(f"{name}\nTFLOP/s", fontsize=9.5)
    highest = max(
        rate for _, measured, _ in strips for f in measured.values() for rate in f.values()
    )
    panels[0][0].set_ylim(0, 1.06 * highest)
    panels[0][0].locator_params(axis="y", nbins=5)
    for column, head_dim in enumerate(head_dims):
        panels[0][column].set_title(f"head dim {head_dim}", fontsize=10)
        panels[-1][column].set_xlabel("sequence length", fontsize=style.SMALL)
    known = {
        text: line
        for panel in panels.flat
        for line, text in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    order = [name for name in _names(strips) if name in known]
    columns = min(len(order), 3)
    figure.legend(
        [known[name] for name in order], order,
        loc="lower center", ncols=columns, frameon=False, fontsize=style.SMALL, columnspacing=1.2,
    )  # fmt: skip
    top = style.entitle(figure, title, *lines)
    legend = (0.12 + 0.22 * -(-len(order) // columns)) / figure.get_figheight()
    figure.tight_layout(rect=(0, legend, 1, top), h_pad=1.0, w_pad=0.6)
    return figure


def _names(strips: Sequence[Strip]) -> list[str]:
    """The legend: contenders as the styles order them."""
    present = {name for _, measured, _ in strips for name in measured}
    return [style.label(name, short=True) for name in style.STYLES if name in present]


def _draw_panel(panel: Axes, measured: Rates, head_dim: int, causal: bool) -> None:
    lengths: list[int] = []
    # Ours are drawn last, on top.
    for name in sorted(measured, key=style.is_ours):
        here = {
            point.seqlen: rate
            for point, rate in measured[name].items()
            if (point.head_dim, point.causal) == (head_dim, causal)
        }
        if not here:
            continue
        lengths = sorted({*lengths, *here})
        x, y = sorted(here), [here[length] for length in sorted(here)]
        label, (color, marker) = style.label(name, short=True), style.STYLES[name]
        ours = style.is_ours(name)
        panel.plot(
            x,
            y,
            color=color,
            marker=marker,
            markersize=5 if ours else 4,
            markeredgecolor="white",
            markeredgewidth=0.6,
            linewidth=1.9 if ours else 1.1,
            linestyle="-" if ours else (0, (4, 2)),
            label=label,
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [length(one) for one in lengths])
    panel.minorticks_off()
    panel.margins(x=0.08)
    style.plain(panel)
