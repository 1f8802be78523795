"""Output in a pipe, in a terminal, without rich, without colors; nothing wider than its place."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterable

import pytest
from fake_machines import MACHINES, examined

from flashvar.cli import doctor_page, main, page_text, screen
from flashvar.cli.page import Page, Section, Table, rows
from flashvar.cli.speed import Result, Speed, record_of
from flashvar.ops.attention.speed import CELLS

PAGE = Page(
    "All is well.",
    "good",
    (
        Section("Numbers", (Table(rows([("one", "1"), ("eleven", "11")]), ("name", "size")),)),
        Section("Nothing", otherwise="nothing here", notes=("a note",)),
    ),
    "To change that",
    ('pip install "flashvar[sm89]"',),
)
RATES = {"flashvar": 1234.5, "sdpa-flash": 1234.5, "sdpa-cudnn": 1234.5}
SPEED = Speed(
    0,
    "NVIDIA H200",
    tuple(Result("attention", cell, "cuda sm_120", RATES, {}) for cell in CELLS),
    record_of("NVIDIA H200"),
)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """What a program takes for a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colorful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terminals have colors and 80 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def on_terminal(run: Callable[[], object]) -> str:
    """What is shown to somebody at a terminal."""
    with contextlib.redirect_stdout(Terminal()) as stream:
        run()
    return stream.getvalue()


def test_text() -> None:
    head, *rest = page_text.render(PAGE).splitlines()
    assert head.endswith(": All is well.")
    assert rest == [
        "",
        "Numbers",
        "  name    size",
        "  one     1",
        "  eleven  11",
        "",
        "Nothing",
        "  nothing here",
        "  a note",
        "",
        "To change that",
        '  pip install "flashvar[sm89]"',
    ]


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    screen.show(PAGE)
    assert capsys.readouterr().out == page_text.render(PAGE)


def test_a_terminal_gets_colors_and_the_same_words() -> None:
    shown = on_terminal(lambda: screen.show(PAGE))
    assert "\x1b[" in shown
    plain = ESCAPE.sub("", shown)
    assert plain.splitlines()[0].startswith("✓ flashvar ")
    assert plain.splitlines()[-1] == '  pip install "flashvar[sm89]"'
    for word in ("All is well.", "eleven", "nothing here", "a note", "To change that"):
        assert word in plain


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = on_terminal(lambda: screen.show(PAGE))
    codes = ";".join(re.findall(r"\x1b\[([0-9;]*)m", shown))
    assert set(codes.split(";")) <= {"", "0", "1", "2"}  # bold and dim are no colors


@pytest.mark.parametrize("reason", ["without rich", "dumb"])
def test_a_terminal_that_rich_cannot_serve_gets_plain_text(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert on_terminal(lambda: screen.show(PAGE)) == page_text.render(PAGE, 80)


def test_json_is_never_colored() -> None:
    shown = on_terminal(lambda: main(["doctor", "--json"]))
    assert "\x1b" not in shown
    json.loads(shown)


@pytest.mark.parametrize(
    ("form", "width", "names"),
    [
        ("rich", 80, MACHINES),
        ("text", 80, MACHINES),
        # Wide lines break less: half of the machines in each form.
        ("rich", 120, list(MACHINES)[::2]),
        ("text", 120, list(MACHINES)[1::2]),
    ],
    ids=["rich-80", "text-80", "rich-120", "text-120"],
)
def test_every_machine_fits(
    form: str, width: int, names: Iterable[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    if form == "text":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    found = {name: unfit(doctor_page.page(examined(name)), width) for name in names}
    assert {name: lacking for name, lacking in found.items() if lacking} == {}


def unfit(page: Page, width: int) -> list[str]:
    """Lines that are too long, and what of a page is not shown whole."""
    lines = ESCAPE.sub("", on_terminal(lambda: screen.show(page))).splitlines()
    commands = {f"  {command}" for command in page.commands}
    found = [line for line in lines if len(line) > width and line not in commands]
    # Broken or not, every word is there; short cells are whole.
    words = " ".join(" ".join(lines).split())
    tables = [table for section in page.sections for table in section.tables]
    cells = {cell for table in tables for row in table.rows for cell in row.cells}
    cells |= {cell for table in tables for cell in table.heading}
    short = [" ".join(cell.split()) for cell in cells if len(cell) <= 24]
    return found + [one for one in (page.summary, *short) if one not in words]


def test_long_columns_are_broken_without_losing_a_letter() -> None:
    origin = f"FLASHVAR_LIB_DIR ({'/very' * 12})"
    page = Page("", "", (Section("S", (Table(rows([("sm_80", origin, "one two three " * 9)])),)),))
    text = page_text.render(page, 80)
    assert "".join(text.split()).endswith("".join((origin + "one two three " * 9).split()))
