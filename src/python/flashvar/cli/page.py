"""The contents of a command's output, independent of rendering: sections, tables, commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# The tone of a row or of the summary. A terminal shows it as a color, plain text does not show it.
GOOD: Final = "good"
BAD: Final = "bad"
QUIET: Final = "quiet"
PLAIN: Final = ""


@dataclass(frozen=True)
class Row:
    """Cells of a table, as many as its other rows have."""

    cells: tuple[str, ...]
    tone: str = PLAIN


@dataclass(frozen=True)
class Table:
    """Aligned rows; only the last column may be wrapped."""

    rows: tuple[Row, ...]
    heading: tuple[str, ...] = ()
    caption: str = ""  # a line above the rows
    numbers: frozenset[int] = frozenset()  # right-aligned columns


@dataclass(frozen=True)
class Section:
    """A title, tables, and notes below them; without tables the text `otherwise`."""

    title: str
    tables: tuple[Table, ...] = ()
    otherwise: str = "none"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """Everything that a command shows."""

    summary: str  # the first line
    tone: str
    sections: tuple[Section, ...] = ()
    commands_title: str = ""
    commands: tuple[str, ...] = ()  # at the end, each on its own line, to be copied


def rows(cells: Sequence[Sequence[str]], tone: str = PLAIN) -> tuple[Row, ...]:
    """Rows of one tone."""
    return tuple(Row(tuple(one), tone) for one in cells)


def counted(number: int, one: str, many: str = "") -> str:
    """`1 kernel`, `2 kernels`, `2 binaries`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
