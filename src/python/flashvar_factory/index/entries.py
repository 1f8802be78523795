"""The entry of one file in an index: its hash, and what its own metadata declares."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from flashvar_factory.errors import PackagingError


class Entry(NamedTuple):
    """One file of a project's page."""

    file: str
    size: int  # bytes
    sha256: str  # hex
    version: str | None = None  # None for a list of variants, which no installer takes for a file
    requires_python: str | None = None
    metadata: bytes | None = None  # METADATA of a wheel, served beside it (PEP 658)
    yanked: str | None = None  # the reason

    @property
    def metadata_sha256(self) -> str | None:
        """Hex; None where there is no metadata."""
        return None if self.metadata is None else hashlib.sha256(self.metadata).hexdigest()


def project_of(file: str) -> str:
    """The project that a wheel, an sdist or a list of variants belongs to, by its file name."""
    return canonicalize_name(file.split("-")[0])


def read(path: Path, content: bytes) -> Entry:
    """The entry of a file; PackagingError when it is not what its name says."""
    entry = Entry(path.name, len(content), hashlib.sha256(content).hexdigest())
    if path.suffix == ".json":
        return entry
    wheel = path.suffix == ".whl"
    try:
        metadata = _wheel_metadata(content) if wheel else _sdist_metadata(content)
    except (zipfile.BadZipFile, tarfile.TarError, ValueError, EOFError, OSError) as error:
        kind = "a wheel with one METADATA" if wheel else "an sdist with one PKG-INFO"
        raise PackagingError(f"{path}: expected {kind}, found: {error}") from error
    headers = HeaderParser().parsestr(metadata.decode("utf-8"))
    name, version = str(headers["Name"]), str(headers["Version"])
    of_name = path.name.removesuffix(".tar.gz").split("-")[1:2]
    if canonicalize_name(name) != project_of(path.name) or of_name != [version]:
        raise PackagingError(f"{path}: expected the metadata to agree, found {name} {version}")
    return entry._replace(
        version=version,
        requires_python=headers["Requires-Python"],
        metadata=metadata if wheel else None,
    )


def _wheel_metadata(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        pattern = r"[^/]+\.dist-info/METADATA"
        (name,) = (name for name in archive.namelist() if re.fullmatch(pattern, name))
        return archive.read(name)


def _sdist_metadata(content: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        members = archive.getmembers()
        (member,) = (one for one in members if re.fullmatch(r"[^/]+/PKG-INFO", one.name))
        file = archive.extractfile(member)
        if file is None:
            raise ValueError(f"{member.name} is no file")
        return file.read()
