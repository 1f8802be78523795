"""Values of options that are lists, such as `64,192x128`, for argparse's `type`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


def numbers(text: str) -> list[int]:
    """`64,128` as integers."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers such as 64,128, found {text!r}"
        ) from None


def pairs(text: str) -> list[tuple[int, int]]:
    """`64,192x128` as pairs; one number stands for two."""
    found = []
    for word in text.split(","):
        first, _, second = word.partition("x")
        try:
            found.append((int(first), int(second or first)))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected sizes such as 64,192x128, found {text!r}"
            ) from None
    return found


def names(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """Words of which each is one of those allowed."""
    known = tuple(allowed)
    expected = " or ".join((", ".join(known[:-1]), known[-1])) if len(known) > 1 else known[0]

    def parsed(text: str) -> list[str]:
        words = text.split(",")
        if wrong := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"expected {expected}, found {wrong[0]!r}")
        return words

    return parsed


def unique(lists: Iterable[Iterable[T]]) -> tuple[T, ...]:
    """What several lists hold, each once, in order."""
    return tuple(dict.fromkeys(chain.from_iterable(lists)))
