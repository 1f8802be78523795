"""What a command shows, before anyone decides how: a verdict, sections of tables, and commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# What a row or a verdict is to the reader; a terminal colours it, plain text does not.
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
    """Aligned rows; the last column may be broken, the others are not."""

    rows: tuple[Row, ...]
    heading: tuple[str, ...] = ()
    caption: str = ""  # a line above, which the rows explain
    numbers: frozenset[int] = frozenset()  # columns that are aligned on the right


@dataclass(frozen=True)
class Section:
    """A title, tables or, without one, `otherwise`, and notes below them."""

    title: str
    tables: tuple[Table, ...] = ()
    otherwise: str = "none"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """All that a command shows."""

    verdict: str
    tone: str
    sections: tuple[Section, ...] = ()
    remedy: str = ""  # what the commands are good for
    commands: tuple[str, ...] = ()  # last, each on a line of its own that can be copied


def rows(cells: Sequence[Sequence[str]], tone: str = PLAIN) -> tuple[Row, ...]:
    """Rows of one tone."""
    return tuple(Row(tuple(one), tone) for one in cells)


def counted(number: int, one: str, many: str = "") -> str:
    """`1 kernel`, `2 kernels`, `2 binaries`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
