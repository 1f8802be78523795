"""Sizes of blocks: powers of 2."""

from __future__ import annotations


def power_of_2(least: int) -> int:
    """The smallest power of 2 that is at least `least`: that of Triton takes microseconds."""
    return 1 << max(least - 1, 0).bit_length()
