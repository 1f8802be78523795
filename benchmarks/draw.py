"""Draw pictures, as PNG and SVG, from what `run.py attention --json` wrote.

    python benchmarks/draw.py benchmarks/results/attention-h200.json --out benchmarks/pictures

Two pictures for each direction: rates by length, and flashvar's ratios to its peers. Several files
make one picture; of a cell that is in two, the later one counts. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by all; ours are strong, the peers' muted. With markers, so
# that the picture also works in grey.
_STYLES: Final[dict[str, tuple[str, str, str]]] = {
    "flashvar-cuda": ("flashvar (CUDA)", "#D55E00", "o"),
    "flashvar-triton": ("flashvar (Triton)", "#0072B2", "s"),
    "sdpa-flash": ("SDPA FlashAttention-2", "#000000", "^"),
    "sdpa-cudnn": ("SDPA cuDNN", "#009E73", "D"),
    "flex": ("FlexAttention, compiled", "#CC79A7", "v"),
    "sdpa-efficient": ("SDPA memory-efficient", "#999999", "P"),
}
_OURS: Final = ("flashvar-cuda", "flashvar-triton")
_MASKS: Final = {False: "no mask", True: "causal"}


@dataclass(frozen=True)
class Point:
    """A place in the pictures."""

    head_dim: int
    causal: bool
    seqlen: int

    def __str__(self) -> str:
        return f"{self.head_dim}, {_length(self.seqlen)}, {_MASKS[self.causal]}"


Rates = dict[str, dict[Point, float]]


def main() -> int:
    """Command line; 2 where there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, help="JSON of the attention benchmark")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/pictures"), metavar="FOLDER")
    parser.add_argument("--name", default="attention", help="first word of the pictures' names")
    options = parser.parse_args()
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in options.files]
    card = documents[-1]["environment"]["device"]["name"]
    drawn = 0
    options.out.mkdir(parents=True, exist_ok=True)
    for direction in ("forward", "backward"):
        rates = _rates([row for document in documents for row in document["rows"]], direction)
        if not rates:
            continue
        subtitle = f"{card}, bf16, 16,384 tokens a batch, heads = 2048 / head dim"
        for kind, figure in (
            ("rates", _draw_rates(rates, f"Attention {direction}", subtitle)),
            ("ratios", _draw_ratios(rates, f"Attention {direction}", subtitle)),
        ):
            for ending in ("png", "svg"):
                target = options.out / f"{options.name}-{direction}-{kind}.{ending}"
                figure.savefig(
                    target, dpi=150, metadata={"Date": None} if ending == "svg" else None
                )
                drawn += 1
                print(target)
            pyplot.close(figure)
    if not drawn:
        print("expected timed rows of `run.py attention`, found none: measure first")
    return 0 if drawn else 2


def _rates(rows: Sequence[dict[str, Any]], direction: str) -> Rates:
    """TFLOP/s by contender and point; contenders in the order of the styles."""
    found: Rates = {name: {} for name in _STYLES}
    for row in rows:
        if row["direction"] == direction and "tflops" in row and row["contender"] in found:
            point = Point(row["head_dim"], row["causal"], row["seqlen"])
            found[row["contender"]][point] = row["tflops"]
    return {name: points for name, points in found.items() if points}


def _draw_rates(rates: Rates, title: str, subtitle: str) -> Figure:
    """One panel for each head dim and mask, one line for each contender."""
    points = {point for by_point in rates.values() for point in by_point}
    head_dims, masks = sorted({p.head_dim for p in points}), sorted({p.causal for p in points})
    figure, panels = pyplot.subplots(
        *(len(masks), len(head_dims)),
        figsize=(3.6 * len(head_dims) + 0.6, 2.9 * len(masks) + 1.5),
        sharey="row",
        squeeze=False,
    )
    for row, causal in enumerate(masks):
        for column, head_dim in enumerate(head_dims):
            _draw_panel(panels[row][column], rates, head_dim, causal)
        panels[row][0].set_ylabel(f"{_MASKS[causal]}\nTFLOP/s")
        panels[row][0].set_ylim(bottom=0)
    for column, head_dim in enumerate(head_dims):
        panels[0][column].set_title(f"head dim {head_dim}", fontsize=11)
        panels[-1][column].set_xlabel("sequence length")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=min(len(labels), 3), frameon=False)
    _entitle(figure, title, subtitle)
    lines = -(-len(labels) // 3)
    figure.tight_layout(rect=(0, 0.015 + 0.045 * lines, 1, 0.9))
    return figure


def _draw_panel(panel: Axes, rates: Rates, head_dim: int, causal: bool) -> None:
    lengths: list[int] = []
    # Ours are drawn last, on top.
    for name in sorted(rates, key=lambda name: name in _OURS):
        label, colour, marker = _STYLES[name]
        here = {
            p.seqlen: r
            for p, r in rates[name].items()
            if (p.head_dim, p.causal) == (head_dim, causal)
        }
        lengths = sorted({*lengths, *here})
        panel.plot(
            sorted(here),
            [here[length] for length in sorted(here)],
            color=colour,
            marker=marker,
            markersize=6,
            linewidth=2.2 if name in _OURS else 1.3,
            linestyle="-" if name in _OURS else (0, (4, 2)),
            label=label,
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [_length(length) for length in lengths])
    panel.minorticks_off()
    panel.margins(x=0.08)
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_ratios(rates: Rates, title: str, subtitle: str) -> Figure:
    """A table of ratios, coloured: violet is faster than the peer, orange slower."""
    pairs = [(ours, peer) for ours in _OURS if ours in rates for peer in rates if peer not in _OURS]
    points = sorted(
        {point for by_point in rates.values() for point in by_point},
        key=lambda p: (p.head_dim, p.causal, p.seqlen),
    )
    table = [
        [
            rates[ours][point] / rates[peer][point]
            if point in rates[ours] and point in rates[peer]
            else float("nan")
            for ours, peer in pairs
        ]
        for point in points
    ]
    means = [
        geometric_mean([r for r in column if r == r] or [float("nan")])
        for column in zip(*table, strict=True)
    ]
    rows = [*table, means]
    width = max(2.4 + 1.35 * len(pairs), 7.6)  # the title's
    figure, panel = pyplot.subplots(figsize=(width, 2.1 + 0.31 * len(rows)))
    # Twice as fast and half as fast are equally far from white.
    logarithms = [[log2(ratio) for ratio in row] for row in rows]
    panel.imshow(logarithms, cmap="PuOr", vmin=-1.1, vmax=1.1, aspect="auto")
    for y, row in enumerate(rows):
        for x, ratio in enumerate(row):
            text = "-" if ratio != ratio else f"{ratio:.2f}"
            dark = abs(logarithms[y][x]) > 0.7
            weight = "bold" if y == len(points) else "normal"
            colour = "white" if dark else "black"
            panel.text(
                x, y, text, ha="center", va="center", color=colour, weight=weight, fontsize=9
            )
    panel.axhline(len(points) - 0.5, color="white", linewidth=4)
    for y, point in enumerate(points[1:], start=1):
        if point.head_dim != points[y - 1].head_dim:
            panel.axhline(y - 0.5, color="white", linewidth=2)
    panel.set_yticks(range(len(rows)), [*(str(point) for point in points), "geometric mean"])
    columns = [f"{_STYLES[o][0]}\n/ {_STYLES[p][0].removesuffix(', compiled')}" for o, p in pairs]
    panel.set_xticks(
        range(len(pairs)), [c.replace("FlashAttention-2", "FA2") for c in columns], fontsize=8
    )
    panel.xaxis.tick_top()
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    _entitle(
        figure, f"{title}: flashvar's rate over a peer's", f"head dim, length, mask; {subtitle}"
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.75 / figure.get_figheight()))
    return figure


def _entitle(figure: Figure, title: str, subtitle: str) -> None:
    height = figure.get_figheight()
    figure.text(0.01, 1 - 0.12 / height, title, va="top", fontsize=14, weight="bold")
    figure.text(0.01, 1 - 0.42 / height, subtitle, va="top", fontsize=9, color="#555555")


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


if __name__ == "__main__":
    sys.exit(main())
