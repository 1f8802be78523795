"""A finding: one error that the audit found in a wheel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from flashvar_factory.inspect.plain_text import plain

_SHOWN: Final = 4
_LONGEST: Final = 2000
# Characters of a long text that are shown, and how many of them before a difference.
_PART: Final = 160
_BEFORE: Final = 40


@dataclass(frozen=True)
class Finding:
    """One error: a sentence of what was expected, what was found and what to do."""

    check: str  # the name of the check that found it
    where: str  # a file in the wheel, or the wheel's own name
    message: str

    def __post_init__(self) -> None:
        """Keep the sentence short and in one line, whatever a hostile file has in it."""
        message = self.message
        if len(message) > _LONGEST:
            message = f"{message[:_LONGEST]} ..."
        object.__setattr__(self, "message", plain(message))
        object.__setattr__(self, "where", plain(self.where))

    def __str__(self) -> str:
        """One line."""
        return f"{self.check}: {self.where}: {self.message}"


def some(names: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def where_they_differ(wanted: object, found: object) -> tuple[object, object]:
    """Both values; of long texts, only the parts around their first difference."""
    if not (isinstance(wanted, str) and isinstance(found, str)):
        return wanted, found
    if max(len(wanted), len(found)) <= _PART:
        return wanted, found
    same = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, found, strict=False))
    start = max(sum(1 for _ in same) - _BEFORE, 0)
    dots = "..." if start else ""
    part = slice(start, start + _PART)
    return f"{dots}{wanted[part]}", f"{dots}{found[part]}"
