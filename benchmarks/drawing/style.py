"""What all pictures have in common: their width, who has which color, and where titles stand."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from benchmarks.names import CONTENDERS

# Okabe and Ito's colors, told apart by all; with markers, so that pictures also work in grey.
# Ours are strong and solid, the peers' dashed.
STYLES: Final[dict[str, tuple[str, str]]] = {
    "flashvar-cuda": ("#D55E00", "o"),
    "flashvar-sm80": ("#E69F00", "h"),
    "flashvar-triton": ("#0072B2", "s"),
    "sdpa-flash": ("#222222", "^"),
    "sdpa-cudnn": ("#009E73", "D"),
    "flex": ("#CC79A7", "v"),
    "sdpa-efficient": ("#999999", "P"),
    "flash-attn": ("#6B4C9A", "<"),
    "flash-attn-3": ("#B8860B", "d"),
    "flash-attn-4": ("#56B4E9", ">"),
    "flashinfer": ("#8C564B", "X"),
    "xformers": ("#117733", "p"),
    "sageattention": ("#AA4499", "*"),
}
SHORT: Final = {
    "flashvar-sm80": "flashvar (mma.sync)",
    "sdpa-flash": "FA2",
    "sdpa-cudnn": "cuDNN",
    "flash-attn-3": "FA3 (vLLM)",
    "flash-attn-4": "FA4",
    "flex": "Flex",
    "sdpa-efficient": "mem.-efficient",
    "sageattention": "Sage (approx.)",
}
# Inches. A phone shows this as about 360 pixels, and so the smallest letters, of 9 points, as 9.
WIDTH: Final = 5.0
SMALL: Final = 9.0
GREY: Final = "#666666"
_GRID: Final = "#e2e2e2"


def faded(color: str) -> tuple[float, float, float]:
    """A color mixed with white, for what stands behind ours."""
    red, green, blue = (0.55 * part + 0.45 for part in to_rgb(color))
    return red, green, blue


def is_ours(contender: str) -> bool:
    """Whether it is flashvar."""
    return contender.startswith("flashvar")


def label(contender: str, *, short: bool = False) -> str:
    """What a contender is called in pictures."""
    return (SHORT if short else {}).get(contender, CONTENDERS[contender])


def machine(environment: Mapping[str, Any]) -> str:
    """One line: the card, its driver, and the versions that decide what runs."""
    device, versions = environment["device"], environment.get("versions", {})
    parts = [str(device["name"])]
    if device.get("driver"):
        parts.append(f"driver {device['driver']}")
    if versions.get("torch"):
        parts.append(f"torch {versions['torch']}")
    if cudnn := device.get("cudnn"):
        parts.append(f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}")
    if versions.get("triton"):
        parts.append(f"Triton {versions['triton']}")
    return ", ".join(parts)


def plain(axes: Axes, grid: str | None = "y") -> None:
    """Few lines: no box, a light grid along one axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(color="#999999", labelsize=SMALL)
    if grid:
        axes.grid(axis=grid, color=_GRID, linewidth=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def entitle(figure: Figure, title: str, *lines: str) -> float:
    """Writes title and lines at the top left; gives where they end, as a part of the height."""
    width, height = figure.get_size_inches()
    below = 0.1  # inches from the top
    for text in wrap(title, round(9 * width)):
        figure.text(0.015, 1 - below / height, text, va="top", fontsize=12, weight="bold")
        below += 0.21
    below += 0.05
    for text in (part for line in lines for part in wrap(line, round(14 * width))):
        figure.text(0.015, 1 - below / height, text, va="top", fontsize=SMALL, color=GREY)
        below += 0.165
    return float(1 - (below + 0.06) / height)
