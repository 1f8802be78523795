"""What has to be downloaded: flashvar's wheels beside the peers' of `peer_sizes.toml`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.drawing import style
from benchmarks.names import note_on_wheel

_OURS, _THEIRS, _COMPILES = "#D55E00", "#8a8f98", "#c9ccd1"
_BAR: Final = 0.34  # inches


def draw(rows: Sequence[dict[str, Any]], peers: Sequence[dict[str, Any]], *lines: str) -> Figure:
    """The picture of the rows of `run.py size`, one platform's, and of the peers."""
    ours = [
        (row["distribution"], row["bytes"], row["installed_bytes"], note_on_wheel(row["version"]))
        for row in rows
    ]
    theirs = sorted(
        (
            (f"{p['package']} {p['version']}", p["bytes"], p["installed_bytes"], p.get("note", ""))
            for p in peers
        ),
        key=lambda bar: bar[1],
    )
    bars = [*ours, *theirs]
    figure, axes = pyplot.subplots(figsize=(style.WIDTH, 1.5 + _BAR * len(bars)))
    longest = max(size for _, size, _, _ in bars)
    for y, (_, size, installed, note) in enumerate(bars):
        color = _OURS if y < len(ours) else _COMPILES if note else _THEIRS
        axes.barh(y, size / 1e6, 0.72, color=color)
        text = f"{_megabytes(size)} ({_megabytes(installed)} installed)"
        inside = size > 0.6 * longest
        axes.annotate(
            text,
            (size / 1e6, y),
            xytext=(-6 if inside else 6, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            fontsize=style.SMALL,
            color="white" if inside else "#222222",
        )
    axes.set_yticks(range(len(bars)), [f"{name}\n{note}".rstrip() for name, _, _, note in bars])
    axes.invert_yaxis()
    axes.axhline(len(ours) - 0.5, color="#bbbbbb", linewidth=0.8)
    axes.set_xlabel("MB to download")
    style.plain(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    axes.margins(y=0.01)
    top = style.entitle(figure, "What pip downloads: wheels of flashvar and of others", *lines)
    figure.tight_layout(rect=(0, 0, 1, top))
    return figure


def _megabytes(size: int) -> str:
    number = size / 1e6
    return f"{number:,.0f} MB" if number >= 100 else f"{number:.1f} MB"
