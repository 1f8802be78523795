"""Checks of every wheel's archive: whole, safe to unpack, and as its RECORD lists it."""

from __future__ import annotations

import base64
import csv
import re
import stat
from collections import Counter
from collections.abc import Iterator

from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Wheel
from flashvar_factory.audit.finding import Finding

# The one file that cannot hold its own hash, and the signatures of it.
_UNRECORDED = ("RECORD", "RECORD.jws", "RECORD.p7s")
_DRIVE = re.compile(r"[A-Za-z]:")


def archive(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """Every member can be read, and unpacks to a file of its own under the target folder."""
    del expected
    for why in wheel.damaged:
        yield Finding("archive", wheel.path.name, f"{why}; build or fetch it again")
    for entry in wheel.entries:
        escape = _escapes(entry.name, entry.mode)
        if escape is not None:
            yield Finding(
                "archive",
                repr(entry.name),
                f"expected a file under the folder it is unpacked to, found {escape}; leave it",
            )
    for name, count in Counter(entry.name for entry in wheel.entries).items():
        if count > 1:
            yield Finding(
                "archive",
                name,
                f"expected one file of this name, found {count}: readers differ in which they take",
            )


def _escapes(name: str, mode: int) -> str | None:
    """Why an entry may land elsewhere, None when it cannot."""
    if name.startswith("/") or _DRIVE.match(name):
        return "an absolute path"
    if ".." in name.split("/"):
        return "a path with '..'"
    if "\\" in name or "\0" in name:
        return "a name that systems read differently"
    kind = stat.S_IFMT(mode)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
    return None


def record(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """RECORD names every file, with its hash and its size, and nothing else."""
    del expected
    text = wheel.metadata("RECORD")
    if text is None:
        yield Finding("record", f"{wheel.info}/RECORD", "expected a RECORD, found none")
        return
    rows = {row[0]: row[1:] for row in csv.reader(text.splitlines()) if row}
    for entry in wheel.entries:
        row = rows.pop(entry.name, None)
        if entry.name.endswith("/") or entry.name.startswith(_signed(wheel)):
            continue
        if row is None:
            yield Finding("record", entry.name, "expected a row in RECORD, found none")
        elif row != [_hash(entry.sha256), str(entry.size)]:
            yield Finding(
                "record",
                entry.name,
                f"expected {','.join(row)} as RECORD says, found {_hash(entry.sha256)},"
                f"{entry.size}; the file was changed after the wheel was made",
            )
    for name in rows:
        yield Finding("record", name, "expected a file, as RECORD says, found none")


def _signed(wheel: Wheel) -> tuple[str, ...]:
    return tuple(f"{wheel.info}/{name}" for name in _UNRECORDED)


def _hash(digest: bytes) -> str:
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
