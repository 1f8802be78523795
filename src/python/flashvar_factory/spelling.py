"""What did they mean? The nearest valid word, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(found: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of `valid`, "" when none is near.

    Numbers are compared as numbers: of 65, 64 and not 256 is meant.
    """
    words = list(valid)
    numbers = [word for word in words if word.isdecimal()]
    if found.isdecimal() and numbers:
        near = [min(numbers, key=lambda word: abs(int(word) - int(found)))]
    else:
        near = difflib.get_close_matches(found, words, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(words: Iterable[object]) -> str:
    """`a, b, c`, for messages that name what is valid."""
    return ", ".join(str(word) for word in words)
