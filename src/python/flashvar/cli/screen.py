"""Shows a page on stdout: through rich in a terminal that has it, else as plain text."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from flashvar.cli import page_text

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console

    from flashvar.cli.page import Page


def show(page: Page) -> None:
    """Print a page on stdout."""
    console = rich_console(sys.stdout)
    if console is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(page_text.render(page, width), end="")
        return
    from flashvar.cli import page_rich

    page_rich.show(page, console)


def rich_console(stream: TextIO) -> Console | None:
    """Rich's console on a terminal; None in a pipe, on a dumb terminal, and without rich.

    Rich itself drops colors if NO_COLOR is set.
    """
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)
