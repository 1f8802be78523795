"""Reads wheels, and writes them: the same content gives the same bytes on every machine."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from packaging.metadata import Metadata
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion

from flashvar.errors import ConfigurationError
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import core_metadata, zip_file
from flashvar_factory.inspect.plain_text import plain

# The first moment a zip archive can name, for builds that were given no SOURCE_DATE_EPOCH.
EARLIEST: Final = 315532800
_LATEST: Final = 4354819198  # the last: 2107-12-31, 23:59:58
_FILE: Final = 0o100644 << 16
_PROGRAM: Final = 0o100755 << 16
_METADATA: Final = re.compile(r"[^/]+\.dist-info/METADATA")
_AGAIN: Final = "build or fetch it again"
_LABEL: Final = re.compile(r"[0-9a-z._]+", re.ASCII)
# Of one tag, or of several that dots join. `any (1)`, as browsers name a second download, is none.
_TAG: Final = re.compile(r"[\w.]+", re.ASCII)


class Name(NamedTuple):
    """The file name of a wheel, taken apart."""

    distribution: str
    version: str
    tag: str  # e.g. py3-none-any
    variant_label: str | None


def parse_name(file: str) -> Name:
    """Take a wheel's file name apart; PackagingError if it is not one."""
    parts = file.removesuffix(".whl").split("-")
    # Name, version, a build number which starts with a digit, three tags, the label of a variant.
    numbered = len(parts) > 5 and parts[2][:1].isdigit()
    label = parts.pop() if len(parts) == 6 + numbered else None
    try:
        if not file.isprintable():
            raise InvalidWheelFilename("letters that do not print")
        parse_wheel_filename("-".join(parts) + ".whl" if file.endswith(".whl") else file)
        for tag in parts[-3:]:
            if not _TAG.fullmatch(tag):
                raise InvalidWheelFilename(f"the tag {tag!r}")
        if label is not None and not _LABEL.fullmatch(label):
            raise InvalidWheelFilename(f"the label {label!r}")
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise PackagingError(
            f"{plain(file)}: expected the file name of a wheel, <name>-<version>-<tags>.whl, "
            f"found: {error}"
        ) from None
    return Name(parts[0], parts[1], "-".join(parts[-3:]), label)


def read(path: Path) -> dict[str, bytes]:
    """The files of a wheel by name; PackagingError when it is no plain zip archive."""
    if not path.is_file():
        raise PackagingError(f"{path}: expected a wheel, found no file; correct the path")
    try:
        return _files(zip_file.members(path), path)
    except PackagingError as error:
        raise PackagingError(f"{error}; {_AGAIN}") from None


def parse(content: bytes, where: Path) -> dict[str, bytes]:
    """Like `read`, from the bytes of a wheel; `where` is what errors call it."""
    try:
        return _files(zip_file.parse(content, where), where)
    except PackagingError as error:
        raise PackagingError(f"{error}; {_AGAIN}") from None


def _files(members: list[zip_file.Member], where: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for member in members:
        if member.name in files:
            raise PackagingError(f"{where}: expected one {member.name!r}, found two")
        if member.is_folder:
            continue
        try:
            files[member.name] = member.read()
        except PackagingError as error:
            raise PackagingError(f"{where}: {error}") from None
    return files


def text(content: bytes, where: str) -> str:
    """The text of a file; PackagingError when it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PackagingError(f"{where}: expected UTF-8, found: {error}") from None


def metadata(path: Path) -> Metadata:
    """The METADATA of a wheel; PackagingError when it has not one, or a wrong one."""
    return core_metadata.read(metadata_file(read(path), path), str(path))


def metadata_file(files: Mapping[str, bytes], where: Path) -> bytes:
    """The bytes of METADATA among the files of a wheel."""
    found = [data for name, data in files.items() if _METADATA.fullmatch(name)]
    if len(found) != 1:
        raise PackagingError(f"{where}: expected a wheel with one METADATA, found {len(found)}")
    return found[0]


def epoch() -> int:
    """The time that everything in a wheel has: SOURCE_DATE_EPOCH, in seconds."""
    text = os.environ.get("SOURCE_DATE_EPOCH", str(EARLIEST))
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > _LATEST:
        raise ConfigurationError(
            f"SOURCE_DATE_EPOCH: expected seconds since 1970, at most {_LATEST}, found {text!r}"
        )
    return max(EARLIEST, int(text))


def write(path: Path, files: Mapping[str, bytes], info: str) -> None:
    """Write a wheel with its RECORD; `info` is the name of its .dist-info folder.

    The bytes depend on `files` and SOURCE_DATE_EPOCH alone: sorted, .dist-info last, one date.
    """
    record = f"{info}/RECORD"
    content = {name: data for name, data in files.items() if name != record}
    content[record] = _record(content, record)
    moment = time.gmtime(epoch())[:6]
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(content, key=lambda name: (name.startswith(f"{info}/"), name)):
            entry = zipfile.ZipInfo(name, moment)
            entry.create_system = 3  # Unix, on every machine
            entry.external_attr = _PROGRAM if name.endswith(".so") else _FILE
            archive.writestr(entry, content[name], zipfile.ZIP_DEFLATED)
    partial.replace(path)


def _record(files: Mapping[str, bytes], record: str) -> bytes:
    """RECORD of these files: their hashes and sizes, and a bare line for itself."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
        lines.writerow([name, f"sha256={digest.decode()}", len(files[name])])
    lines.writerow([record, "", ""])
    return text.getvalue().encode()
