"""Text of any origin for a terminal, in one line."""

from __future__ import annotations


def plain(text: str) -> str:
    """The text, in which what does not print is written as an escape: terminals would follow it."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
