"""What a benchmark hands back: rows for the file and a short table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

Value: TypeAlias = str | int | float | bool | None
Row: TypeAlias = dict[str, Value]

SCHEMA: Final = 2  # of the JSON files, which run.py describes
_REASON: Final = 400  # characters of an error that are kept


class BenchmarkError(Exception):
    """The benchmark cannot run as asked: what was expected, what was found, what to do."""


# Why a case was not measured, as its rows say it in the column skipped.
INTERRUPTED: Final = "KeyboardInterrupt: the run was interrupted"


@dataclass(frozen=True)
class Options:
    """What the command line asked for; empty tuples leave the choice to the benchmark."""

    only: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ()
    seconds: float = 0.25
    processes: int = 0  # that prepare cases at the same time; 0: one after the other, in this one


@dataclass(frozen=True)
class Report:
    """Results of one run: every row, the columns of the table with its lines, and what they say."""

    rows: list[Row]
    columns: tuple[str, ...]
    lines: list[tuple[str, ...]]
    # Tables of their own, printed last; one without lines is left out.
    closing: list[list[tuple[str, ...]]] = field(default_factory=list)

    def table(self) -> str:
        """The lines under their column heads."""
        return aligned([self.columns, *self.lines])

    def last_tables(self) -> str:
        """The closing tables, an empty line between them."""
        return "\n\n".join(aligned(lines) for lines in self.closing if lines)

    def is_whole(self) -> bool:
        """Whether no interrupt kept cases from being measured."""
        return all(row.get("skipped") != INTERRUPTED for row in self.rows)

    def notes(self) -> list[str]:
        """Why contenders did not run, each reason once."""
        skipped = [row for row in self.rows if "skipped" in row]
        return list(dict.fromkeys(f"{row['contender']}: {row['skipped']}" for row in skipped))


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """Lines of equally many cells, the first column left, others right aligned."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def reason(error: Exception) -> str:
    """One line on why a contender did not run."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_REASON]}"


def chosen(names: Sequence[str], patterns: Sequence[str], *, option: str = "--only") -> list[str]:
    """The names that match any of the patterns (shell style; a plain word matches anywhere in it).

    Raises:
        BenchmarkError: when a pattern matches nothing.
    """
    globs = [p if any(c in p for c in "*?[") else f"*{p}*" for p in patterns]
    for pattern, glob in zip(patterns, globs, strict=True):
        if not any(fnmatchcase(name, glob) for name in names):
            raise BenchmarkError(
                f"{option} must name one of {', '.join(names)} (or a part of a name), "
                f"found {pattern!r}: choose from that list"
            )
    return [name for name in names if not globs or any(fnmatchcase(name, g) for g in globs)]
