"""Reads an unpacked wheel, and checks that its RECORD lists every file with its path and hash."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from flashvar.errors import DamagedWheelError
from flashvar.installing.wheel_requirements import WheelRequirement

# The specification of RECORD asks for SHA-256 or stronger.
_ALGORITHMS: Final = frozenset({"sha256", "sha384", "sha512"})
# Files that an installer adds to the metadata folder when it unpacks a wheel, and to the tree.
_ADDED: Final = frozenset({"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
_LOCK: Final = ".lock"


def read(tree: Path, requirement: WheelRequirement) -> Mapping[str, bytes]:
    """The files of the wheel that is unpacked in `tree`, without those of the installer.

    All of them are in the binary's own folder and in that of its metadata.

    Raises:
        DamagedWheelError: a file is missing, changed, elsewhere or not listed.
    """
    info = _info(tree, requirement)
    folders = (f"{requirement.folder}/", f"{info}/")
    added = {f"{info}/{name}" for name in _ADDED}
    record = f"{info}/RECORD"
    files: dict[str, bytes] = {}
    kept = []
    for name, listed, size in _rows(tree / record, requirement):
        if name in added:
            continue
        if name in files or not name.startswith(folders) or not _is_plain(name):
            raise _wrong(requirement, f"each file once and in {' or '.join(folders)}", repr(name))
        files[name] = b"" if name == record else _content(tree, name, listed, requirement)
        kept.append((name, listed, size))
    if strays := sorted(_on_disk(tree) - files.keys() - added - {_LOCK}):
        raise _wrong(requirement, "no file that its RECORD does not list", repr(strays[0]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(kept)
    return {**files, record: text.getvalue().encode()}


def _info(tree: Path, requirement: WheelRequirement) -> str:
    """The name of the folder of its metadata."""
    found = sorted(path.name for path in tree.glob("*.dist-info"))
    if len(found) != 1 or found[0].partition("-")[0] != requirement.folder:
        raise _wrong(
            requirement,
            f"one folder of metadata, of {requirement.folder}",
            ", ".join(found) or "none",
        )
    return found[0]


def _rows(record: Path, requirement: WheelRequirement) -> Iterator[tuple[str, str, str]]:
    try:
        rows = list(csv.reader(io.StringIO(record.read_bytes().decode("utf-8")), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _wrong(requirement, "a RECORD that can be read", str(error)) from error
    for row in filter(None, rows):
        if len(row) != 3:
            raise _wrong(
                requirement, "a file, its hash and its size in each line of RECORD", repr(row)
            )
        yield row[0], row[1], row[2]


def _is_plain(name: str) -> bool:
    """Whether every reader takes the name for the same file inside of the tree."""
    path = PurePosixPath(name)
    return str(path) == name and ".." not in path.parts and name.isprintable() and "\\" not in name


def _content(tree: Path, name: str, listed: str, requirement: WheelRequirement) -> bytes:
    algorithm, _, expected = listed.partition("=")
    if algorithm not in _ALGORITHMS:
        raise _wrong(requirement, f"a SHA-2 hash of {name} in its RECORD", repr(listed))
    path = tree / name
    try:
        if path.resolve(strict=True) != tree.resolve() / name:
            raise _wrong(requirement, f"{name} in its wheel", "a link to another place")
        content = path.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise _wrong(requirement, f"{name} in its wheel", str(error)) from error
    digest = hashlib.new(algorithm, content).digest()
    if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != expected:
        raise _wrong(requirement, f"{name} to have the hash of its RECORD", "other bytes")
    return content


def _on_disk(tree: Path) -> set[str]:
    """The files that are there, and links, by name."""
    found = set()
    for folder, subfolders, names in os.walk(tree):
        links = [one for one in subfolders if Path(folder, one).is_symlink()]
        for name in (*names, *links):
            found.add(Path(folder, name).relative_to(tree).as_posix())
    return found


def _wrong(requirement: WheelRequirement, expected: str, found: str) -> DamagedWheelError:
    return DamagedWheelError(
        f"{requirement}: expected {expected}, found {found}; nothing was installed: fetch it again"
    )
