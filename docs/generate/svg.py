"""Drawings out of boxes, arrows and words, as SVG that takes its colors from the page.

Tones are classes of docs/style.css: `copy` for what moves data, `product` for tensor cores,
`softmax` for everything else that computes, `state` for what is kept, `quiet` for what is left out.
"""

from __future__ import annotations

from html import escape
from typing import Final
from zlib import crc32

# A phone shows this as about 360 pixels, and words of 13 as about 10.
WIDTH: Final = 460


class Drawing:
    """A drawing of a height; `says` is read to those who do not see it."""

    def __init__(self, height: int, says: str) -> None:
        self.tip = f"tip-{crc32(says.encode()):x}"  # ids differ between the drawings of a page
        self.parts = [
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(says)}">',
            f'<defs><marker id="{self.tip}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" class="d-line-fill"/>'
            "</marker></defs>",
        ]

    def box(self, x: float, y: float, width: float, height: float, says: str, tone: str) -> None:
        """A box with one or more lines in its middle."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" class="d-{tone}"/>'
        )
        lines = says.split("\n") if says else []
        first = y + height / 2 - 7.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.words(x + width / 2, first + 15 * number + 4.5, line, "middle")

    def words(self, x: float, y: float, says: str, anchor: str = "start", tone: str = "") -> None:
        """A line of text; `y` is its baseline."""
        kind = f"d-words d-{tone}" if tone else "d-words"
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{escape(says)}</text>'
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through points, with a tip at the last."""
        path = " L".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<path d="M{path}" class="d-line"{dash} marker-end="url(#{self.tip})"/>')

    def line(self, *points: tuple[float, float], dashed: bool = True) -> None:
        """A line without a tip."""
        path = " L".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        self.parts.append(f'<path d="M{path}" class="d-line"{dash}/>')

    def __str__(self) -> str:
        """The drawing on a line of its own, for a page."""
        return f'<div class="drawing">{"".join(self.parts)}</svg></div>'
