"""Renders a page through rich: colors, and tables that fit the width of the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from flashvar._version import __version__
from flashvar.cli.page import BAD, GOOD, PLAIN, QUIET, Page, Section, Table

_STYLES = {GOOD: "green", BAD: "red", QUIET: "dim", PLAIN: ""}
# Cells up to this length are never wrapped.
_SHORT = 24
_SIGNS = {GOOD: "✓ ", BAD: "✗ "}


def show(page: Page, console: Console) -> None:
    """Print the whole page."""
    sign = _SIGNS.get(page.tone, "") if console.encoding.startswith("utf") else ""
    summary = Text.assemble(
        (sign, f"bold {_STYLES[page.tone]}"),
        (f"flashvar {__version__}: ", "bold"),
        (page.summary, f"bold {_STYLES[page.tone]}"),
    )
    console.print(summary)
    for section in page.sections:
        console.print()
        console.print(Text(section.title, "bold cyan"))
        console.print(Padding(_section(section), (0, 0, 0, 2)))
    if page.commands:
        console.print()
        console.print(Text(page.commands_title, "bold cyan"))
    for command in page.commands:  # never wrapped: commands are meant to be copied
        console.print(Text(f"  {command}", "bold yellow"), soft_wrap=True)


def _section(section: Section) -> RenderableType:
    parts: list[RenderableType] = []
    if not section.tables:
        parts.append(Text(section.otherwise, "dim"))
    for number, table in enumerate(section.tables):
        if table.caption:
            parts += [*([Text()] if number else []), Text(table.caption, "bold")]
        parts.append(Padding(_table(table), (0, 0, 0, 2 if table.caption else 0)))
    return Group(*parts, *map(Text, section.notes))


def _table(table: Table) -> RichTable:
    made = RichTable(
        box=SIMPLE_HEAD if table.heading else None,
        show_header=bool(table.heading),
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if table.heading else 2, 0, 0),  # the box adds a column of space
        header_style="bold",
    )
    for index, column in enumerate(zip(*(row.cells for row in table.rows), strict=True)):
        made.add_column(
            Text(table.heading[index]) if table.heading else "",
            justify="right" if index in table.numbers else "left",
            no_wrap=max(map(len, column)) <= _SHORT,
            overflow="fold",
        )
    for row in table.rows:
        made.add_row(*map(Text, row.cells), style=_STYLES[row.tone])
    return made
