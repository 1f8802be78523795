"""The pages of the index as JSON (PEP 691, with the sizes and versions of PEP 700)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import quote

from flashvar_factory.index.entries import Entry

CONTENT_TYPE: Final = "application/vnd.pypi.simple.v1+json"
FILE_NAME: Final = "index.v1.json"
_META: Final = {"api-version": "1.1"}


def project(name: str, entries: Sequence[Entry]) -> str:
    """The document of one project."""
    versions = sorted({entry.version for entry in entries if entry.version is not None})
    return _text(
        {"meta": _META, "name": name, "versions": versions, "files": [_file(e) for e in entries]}
    )


def root(names: Iterable[str]) -> str:
    """The document that lists the projects."""
    return _text({"meta": _META, "projects": [{"name": name} for name in sorted(names)]})


def _file(entry: Entry) -> dict[str, Any]:
    file: dict[str, Any] = {
        "filename": entry.file,
        "url": quote(entry.file),
        "hashes": {"sha256": entry.sha256},
        "size": entry.size,
    }
    if entry.requires_python is not None:
        file["requires-python"] = entry.requires_python
    if entry.metadata_sha256 is not None:
        file["core-metadata"] = {"sha256": entry.metadata_sha256}
    if entry.yanked is not None:
        file["yanked"] = entry.yanked
    return file


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"
