"""The entry of one file in an index: its hash, and what its own metadata declares."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final, NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import Version

from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive, core_metadata, json_text, sdist, variant_metadata

_LIMIT: Final = 1 << 20  # bytes of a list of variants; ours has 5,000
_VARIANTS = re.compile(r"[a-z0-9_]+-[a-z0-9.!+_]+-variants\.json", re.ASCII)


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


def identity(entry: Entry) -> tuple[Version, str] | None:
    """What installers take a file of a project for, however its name is spelled."""
    if entry.version is None:
        return None
    rest = ".tar.gz" if entry.file.endswith(".tar.gz") else entry.file.split("-", 2)[2]
    return Version(entry.version), rest.casefold()


def read(path: Path, content: bytes) -> Entry:
    """The entry of a file; PackagingError when it is not what its name says."""
    entry = Entry(path.name, len(content), hashlib.sha256(content).hexdigest())
    if path.suffix == ".json":
        if not _VARIANTS.fullmatch(path.name):
            raise PackagingError(
                f"{path}: expected the name <project>-<version>-variants.json, found another"
            )
        _check_variants(content, path)
        return entry
    wheel = path.suffix == ".whl"
    if wheel:
        archive.parse_name(path.name)
    metadata = (_wheel_metadata if wheel else _sdist_metadata)(path, content)
    read = core_metadata.read(metadata, str(path))
    name, version = read.name, str(read.version)
    parts = path.name.removesuffix(".tar.gz").split("-")[1:]
    of_name = parts[:1] if wheel else parts
    if canonicalize_name(name) != project_of(path.name) or of_name != [version]:
        raise PackagingError(f"{path}: expected the metadata to agree, found {name} {version}")
    return entry._replace(
        version=version,
        requires_python=core_metadata.requires_python(metadata),
        metadata=metadata if wheel else None,
    )


def _check_variants(content: bytes, path: Path) -> None:
    """PackagingError where a list of variants is not what installers read."""
    if len(content) > _LIMIT:
        raise PackagingError(f"{path}: expected at most {_LIMIT:,} bytes, found {len(content):,}")
    found = json_text.parse(content, str(path))
    try:
        variant_metadata.check(found)
    except PackagingError as error:
        raise PackagingError(f"{path}: expected a list of variants, found: {error}") from None


def _wheel_metadata(path: Path, content: bytes) -> bytes:
    return archive.metadata_file(archive.parse(content, path), path)


def _sdist_metadata(path: Path, content: bytes) -> bytes:
    found = sdist.parse(content, path).get("PKG-INFO")
    if found is None:
        raise PackagingError(f"{path}: expected an sdist with one PKG-INFO, found none")
    return found
