"""Renders a page as plain text, for pipes and for terminals where rich is not installed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from flashvar._version import __version__
from flashvar.cli.page import Page, Row, Table

_INDENT = "  "
_GAP = "  "
# The last column is wrapped only if it is at least this wide.
_NARROWEST = 24


def render(page: Page, width: int | None = None) -> str:
    """The whole page; lines are wrapped only if a width is given."""
    return "\n".join(_lines(page, width)) + "\n"


def _lines(page: Page, width: int | None) -> Iterator[str]:
    yield from _broken(f"flashvar {__version__}: {page.summary}", "", width)
    for section in page.sections:
        yield f"\n{section.title}"
        if not section.tables:
            yield _INDENT + section.otherwise
        for table in section.tables:
            yield from _table(table, width)
        for note in section.notes:
            yield from _broken(_INDENT + note, _INDENT, width)
    if page.commands:
        yield f"\n{page.commands_title}"
        yield from (_INDENT + command for command in page.commands)


def _table(table: Table, width: int | None) -> Iterator[str]:
    if table.caption:
        yield from _broken(_INDENT + table.caption, _INDENT * 3, width)
    table_rows = [*([Row(table.heading)] if table.heading else []), *table.rows]
    widths = [
        max(map(len, column)) for column in zip(*(row.cells for row in table_rows), strict=True)
    ]
    indent = _INDENT * (3 if table.caption else 1)
    for row in table_rows:
        *first, last = (
            cell.rjust(size) if index in table.numbers else cell.ljust(size)
            for index, (cell, size) in enumerate(zip(row.cells, widths, strict=True))
        )
        start = indent + "".join(cell + _GAP for cell in first)
        yield from _broken((start + last).rstrip(), " " * len(start), width)


def _broken(line: str, indent: str, width: int | None) -> list[str]:
    """The line wrapped to `width`; continuation lines start with `indent`."""
    if width is None or len(line) <= width:
        return [line]
    if width - len(indent) < _NARROWEST:
        indent = _INDENT * 4
    head = len(indent)
    if line[:head].strip() and not line[head - 1 : head].isspace():
        head = 0
    # The columns before the last keep their spaces.
    broken = textwrap.wrap(
        line[head:],
        max(width - len(indent), _NARROWEST),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line[:head] + broken[0], *(indent + one for one in broken[1:])]
