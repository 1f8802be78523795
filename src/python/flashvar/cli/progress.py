"""Progress of a long command on stderr: a bar in a terminal with rich, else one line per step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from flashvar.cli import screen

Step = TypeVar("Step")


def follow(
    steps: Sequence[Step], name: Callable[[Step], str], *, quiet: bool = False
) -> Iterator[Step]:
    """Iterate over the steps and show progress; a step ends when the next is requested."""
    if quiet:
        yield from steps
        return
    console = screen.rich_console(sys.stderr)
    if console is None:
        yield from _in_lines(steps, name)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    text = TextColumn("{task.description}")
    with Progress(*columns, text, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(task, description=name(step))
            yield step
            progress.advance(task)


def _in_lines(steps: Sequence[Step], name: Callable[[Step], str]) -> Iterator[Step]:
    for number, step in enumerate(steps, 1):
        start = time.perf_counter()
        yield step
        spent = time.perf_counter() - start
        print(f"{number}/{len(steps)}  {name(step)}: {spent:.1f} s", file=sys.stderr, flush=True)
