"""Checks of every wheel's archive: whole, safe to unpack, and as its RECORD lists it."""

from __future__ import annotations

import base64
import csv
import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Wheel
from flashvar_factory.audit.finding import Finding

# The one file that cannot hold its own hash, and the signatures of it.
_UNRECORDED = ("RECORD", "RECORD.jws", "RECORD.p7s")
# pip unpacks what is in here to the folders of an environment.
_DATA = re.compile(r"[^/]+\.data/(?:purelib|platlib)/")


def archive(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """Every file in the archive can be read, and has a path of its own in the target folder."""
    del expected
    for why in wheel.damaged:
        yield Finding("archive", wheel.path.name, f"{why}; build or fetch it again")
    for entry in wheel.entries:
        if entry.escape is not None:
            yield Finding(
                "archive",
                repr(entry.name),
                f"expected a file with a portable path and mode, found {entry.escape}; do not "
                "install this wheel",
            )
    for name, count in Counter(_installed(entry.name) for entry in wheel.entries).items():
        if count > 1:
            yield Finding(
                "archive",
                name,
                f"expected one file of this name, found {count}: installers differ in which one "
                "they extract",
            )
    ordered = sorted(_installed(entry.name) for entry in wheel.entries)
    for name in ordered:
        first = bisect_left(ordered, f"{name}/")
        if first < len(ordered) and ordered[first].startswith(f"{name}/"):
            yield Finding("archive", name, "expected either a file or a folder, found both")


def _installed(name: str) -> str:
    """Where a member is installed, as systems see it that fold case and accents."""
    match = _DATA.match(name)
    return unicodedata.normalize("NFKC", name[match.end() :] if match else name).casefold()


def record(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """RECORD names every file, with its hash and its size, and nothing else."""
    del expected
    where, text = f"{wheel.info}/RECORD", wheel.metadata("RECORD")
    if text is None:
        yield Finding("record", where, "expected a RECORD, found none")
        return
    plain = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    if text.splitlines() != plain:
        yield Finding(
            "record",
            where,
            "expected lines that end with a line feed, found other line breaks: installers split "
            "them differently",
        )
        return
    try:
        lines = list(csv.reader(plain, strict=True))
    except csv.Error as error:
        yield Finding("record", where, f"expected rows of path, hash and size, found {error}")
        return
    rows: dict[str, list[str]] = {}
    for line in lines:
        if len(line) != 3:  # installers fail at a row without any
            yield Finding("record", where, f"expected three fields in a row, found {len(line)}")
            return
        name, *row = line
        if name in rows:
            yield Finding("record", name, "expected one row in RECORD, found more")
        rows[name] = row
    yield from _entries(wheel, rows)


def _entries(wheel: Wheel, rows: dict[str, list[str]]) -> Iterator[Finding]:
    """The rows are those of the files."""
    own, *signatures = (f"{wheel.info}/{name}" for name in _UNRECORDED)
    for entry in wheel.entries:
        listed = rows.pop(entry.name, None)
        if entry.name.endswith("/"):
            if listed is not None:
                yield Finding(
                    "record", entry.name, "expected files alone in RECORD, found a folder"
                )
            continue
        if entry.name == own or (entry.name in signatures and listed is not None):
            if listed != ["", ""]:
                found = "no row" if listed is None else listed
                yield Finding(
                    "record", entry.name, f"expected a row without hash and size, found {found}"
                )
        elif entry.name in signatures:
            continue
        elif listed is None:
            yield Finding("record", entry.name, "expected a row in RECORD, found none")
        elif not listed[0].startswith("sha256="):
            yield Finding(
                "record", entry.name, f"expected its SHA-256 in RECORD, found {listed[0]!r}"
            )
        elif listed != [_hash(entry.sha256), str(entry.size)]:
            yield Finding(
                "record",
                entry.name,
                f"expected {','.join(listed)} as RECORD says, found {_hash(entry.sha256)},"
                f"{entry.size}; the file was changed after the wheel was made",
            )
    for name in rows:
        yield Finding("record", name, "expected a file, as RECORD says, found none")


def _hash(digest: bytes) -> str:
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
