"""Finds device code within other bytes, in any of its forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from flashvar_factory.inspect import cubin, elf, fatbin, ptx

_CUBIN: Final = re.compile(
    re.escape(elf.MAGIC) + rb".{11}" + re.escape(cubin.MACHINE.to_bytes(2, "little")), re.DOTALL
)
_CONTAINER: Final = re.compile(re.escape(fatbin.START))

Bytes = bytes | memoryview


def _places(pattern: re.Pattern[bytes]) -> Callable[[Bytes], Iterator[int]]:
    return lambda data: (match.start() for match in pattern.finditer(data))


# What each is called, and where it begins.
FORMS: Final[Mapping[str, Callable[[Bytes], Iterator[int]]]] = MappingProxyType(
    {"PTX": ptx.places, "device code": _places(_CONTAINER), "a cubin": _places(_CUBIN)}
)


def within(data: Bytes, start: int = 0) -> str | None:
    """The first form of it that begins at `start` or behind; None where there is none."""
    for form, places in FORMS.items():
        if any(place >= start for place in places(data)):
            return form
    return None
