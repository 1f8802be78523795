"""Describes the first difference between the files of two builds."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive

_SHOWN = 8  # bytes of each side


def of_builds(one: Iterable[Path], two: Iterable[Path]) -> str | None:
    """The first difference of two sets of files, None when names and bytes are the same."""
    left, right = ({path.name: path for path in paths} for paths in (one, two))
    if left.keys() != right.keys():
        return f"their names: {sorted(left)} and {sorted(right)}"
    for name in sorted(left):
        if found := of_files(left[name], right[name]):
            return f"{name}: {found}"
    return None


def of_files(one: Path, two: Path) -> str | None:
    """The first difference of two files; of archives, in the words of their entries."""
    first, second = one.read_bytes(), two.read_bytes()
    if first == second:
        return None
    if one.suffix == ".whl":
        with suppress(PackagingError):  # a damaged archive is compared as bytes
            return _of_wheels(one, two) or of_bytes(first, second)
    return of_bytes(first, second)


def of_bytes(first: bytes, second: bytes) -> str | None:
    """Sizes, and the first byte that differs, with its neighbors."""
    if first == second:
        return None
    pairs = enumerate(zip(first, second, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    shown = " and ".join(data[at : at + _SHOWN].hex(" ") or "the end" for data in (first, second))
    return f"{len(first):,} and {len(second):,} bytes, which differ at byte {at:,}: {shown}"


def _of_wheels(one: Path, two: Path) -> str | None:
    left, right = archive.read(one), archive.read(two)
    names = list(left), list(right)
    if names[0] != names[1]:
        only = sorted(left.keys() ^ right.keys())
        return (
            f"the entries {only} are in one alone" if only else "the entries are sorted otherwise"
        )
    for name in left:
        if found := of_bytes(left[name], right[name]):
            return f"{name}: {found}"
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(two) as second:
        for a, b in zip(first.infolist(), second.infolist(), strict=False):
            for what in ("date_time", "external_attr", "compress_type", "create_system", "extra"):
                if getattr(a, what) != getattr(b, what):
                    return f"{a.filename}: {what} is {getattr(a, what)} and {getattr(b, what)}"
    return None
