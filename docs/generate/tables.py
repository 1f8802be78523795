"""A Markdown table of rows of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The table; a bar within a cell is escaped."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
