"""Puts a checked release into dist/: its files, then the reports. Nothing unchecked gets there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flashvar_factory.errors import ReleaseError
from flashvar_factory.release import members, page, report
from flashvar_factory.release.members import Member
from flashvar_factory.release.steps import digest

REPORTS: Final = tuple(f"{report.NAME}.{ending}" for ending in ("txt", "json", "html"))
_PARTIAL: Final = ".partial"


def prepare(dist: Path, expected: Sequence[Member]) -> None:
    """Refuse other files in `dist`, before minutes are spent; an older report is removed."""
    if not dist.is_dir():
        return
    remove_halves(dist)
    files = [file for file in dist.iterdir() if file.name not in REPORTS]
    found = members.complaints(files, expected, whole=False)
    members.refuse(found, str(dist), "move them away: everything in the folder is uploaded")
    for name in REPORTS:
        (dist / name).unlink(missing_ok=True)


def remove_halves(folder: Path) -> None:
    """Remove what a command that was cut off while it copied left in a folder."""
    for half in folder.glob(f".*{_PARTIAL}"):
        half.unlink()


def copy(file: Path, folder: Path, checked: str) -> None:
    """Copy a file into `folder`; ReleaseError where the copy has another SHA-256 than `checked`."""
    partial = folder / f".{file.name}{_PARTIAL}"
    shutil.copyfile(file, partial)
    found = digest(partial)
    if found != checked:
        partial.unlink()
        raise ReleaseError(
            f"{file}: expected the SHA-256 {checked}, as it was checked, found {found}; "
            "release again"
        )
    partial.replace(folder / file.name)


def publish(dist: Path, files: Sequence[Path], document: Mapping[str, Any]) -> list[Path]:
    """Copy the files into `dist`, and write the reports last; their paths.

    ReleaseError where one has other bytes than the document says; it does not get there.
    """
    dist.mkdir(parents=True, exist_ok=True)
    checked = {one["file"]: one["sha256"] for one in document["files"]}
    for file in files:
        copy(file, dist, checked[file.name])
    texts = (report.text(document), json.dumps(document, indent=1) + "\n", page.html(document))
    for name, text in zip(REPORTS, texts, strict=True):
        (dist / name).write_text(text, encoding="utf-8")
    return [dist / name for name in REPORTS]
