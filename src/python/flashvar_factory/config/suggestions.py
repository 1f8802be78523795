"""Suggests the nearest valid word, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from flashvar.cli.parser import CUTOFF


def did_you_mean(found: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of `valid`, in any case; "" when none is near."""
    near = nearest(found, valid)
    return "" if near is None else suggested(near)


def nearest(found: str, valid: Iterable[str]) -> str | None:
    """The nearest of `valid`, in any case; None when none is near."""
    words = {word.lower(): word for word in valid}
    near = difflib.get_close_matches(found.lower(), words, n=1, cutoff=CUTOFF)
    return words[near[0]] if near else None


def suggested(word: str) -> str:
    """The end of a message that suggests `word`."""
    return f"; did you mean {word!r}?"


def listed(words: Iterable[object]) -> str:
    """`a, b, c`, for messages that name what is valid."""
    return ", ".join(str(word) for word in words)
