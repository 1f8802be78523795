"""Reads JSON of any origin: one error for all that may be wrong with it."""

from __future__ import annotations

import json
from typing import Any

from flashvar_factory.errors import PackagingError


def parse(content: bytes, where: str) -> Any:
    """A document; PackagingError when it is not UTF-8, no JSON, too deep, or has a key twice."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_none)
    except (ValueError, RecursionError) as error:
        raise PackagingError(f"{where}: expected JSON, found: {error}") from None


def _none(name: str) -> Any:
    raise ValueError(f"{name}, which JSON does not have")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice in one object")
    return found
