"""Reads core metadata (METADATA, PKG-INFO), and the extras that requirements belong to."""

from __future__ import annotations

import re
from typing import Final

from packaging.metadata import (
    ExceptionGroup,
    InvalidMetadata,
    Metadata,
    RawMetadata,
    parse_email,
)
from packaging.requirements import Requirement

from flashvar_factory.errors import PackagingError

_SHOWN: Final = 300
LIMIT: Final = 1 << 20  # bytes; a long README takes a tenth of it
# What terminals and pages follow: controls but for tabs and ends of lines, and turns of direction.
_CONTROL: Final = re.compile(r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# `str(marker)` always writes double quotes.
_EXTRA: Final = re.compile(r'\bextra == "(?P<name>[^"]+)"')


def read(content: bytes, where: str) -> Metadata:
    """The metadata in a file called `where`; PackagingError when a field is wrong or not known."""
    if len(content) > LIMIT:
        raise PackagingError(
            f"{where}: expected at most {LIMIT:,} bytes of metadata, found {len(content):,}"
        )
    if content.startswith(b"From "):  # of a mailbox: readers of messages pass over it
        raise PackagingError(f"{where}: expected only fields, found a mailbox's line first")
    if (sign := _CONTROL.search(content.decode("utf-8", "replace"))) is not None:
        raise PackagingError(
            f"{where}: expected text without control characters, found {sign[0]!r}; build it again"
        )
    try:
        # Decoded here: a byte that is no UTF-8 makes other readers skip the field.
        return Metadata.from_email(content.decode("utf-8"), validate=True)
    except ExceptionGroup as errors:
        found = "; ".join(map(_shown, errors.exceptions))
    except (InvalidMetadata, ValueError, RecursionError) as error:
        found = _shown(error)
    raise PackagingError(f"{where}: expected valid core metadata, found: {found}")


def _shown(error: Exception) -> str:
    """What is wrong, as the beginning of one line."""
    return " ".join(str(error).split())[:_SHOWN]


def stated(content: bytes) -> RawMetadata:
    """The fields of metadata that `read` accepts, as they are written."""
    return parse_email(content.decode("utf-8"))[0]


def requires_python(content: bytes) -> str | None:
    """Requires-Python as it is written, which an index repeats; None where it is not stated."""
    return parse_email(content)[0].get("requires_python")


def extra_of(requirement: Requirement) -> str | None:
    """The extra that a requirement belongs to; None for one of the distribution itself."""
    match = _EXTRA.search(str(requirement.marker or ""))
    return match["name"] if match else None
