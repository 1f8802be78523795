"""Compares files with an index: refuses a file if the index has its name with other bytes.

Read by the JSON form of the simple API (PEP 691).
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit

from flashvar.errors import ConfigurationError
from flashvar_factory.errors import PackagingError, ReleaseError
from flashvar_factory.index import simple_json
from flashvar_factory.index.entries import project_of
from flashvar_factory.inspect import json_text
from flashvar_factory.release import members
from flashvar_factory.release.steps import digest

_PATIENCE: Final = 30  # seconds
_LIMIT: Final = 1 << 26  # bytes of a page
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_THIS_MACHINE: Final = ("127.0.0.1", "localhost", "::1")


def absent(files: Iterable[Path], index: str) -> tuple[Path, ...]:
    """Those of `files` that `index` does not have; ReleaseError where it has others of the version.

    A version whose files are not all of one release cannot be mended: their names are used up.
    """
    _check_address(index)
    by_project: dict[str, list[Path]] = {}
    for file in sorted(files):
        by_project.setdefault(project_of(file.name), []).append(file)
    missing, found = [], []
    for project, own in by_project.items():
        listed = hashes(index, project)
        for file in own:
            there, here = listed.get(file.name), digest(file)
            if there is None:
                missing.append(file)
            elif there != here:
                found.append(f"{file.name}: expected the SHA-256 {here}, found {there}")
        names = {file.name for file in own}
        versions = {one.version for file in own if (one := members.read(file)) is not None}
        for name in sorted(listed.keys() - names):
            one = members.read(Path(name))
            if one is not None and one.version in versions:
                found.append(f"{name}: expected only the files of the release, found this too")
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise ReleaseError(
            f"{index}: expected nothing of this version but these files, found\n{lines}\n"
            "a file name is used once: release this as another version"
        )
    return tuple(missing)


def hashes(index: str, project: str) -> dict[str, str]:
    """The SHA-256 of every file that an index lists of a project; none of one it does not know."""
    address = f"{index.rstrip('/')}/{project}/"
    request = urllib.request.Request(address, headers={"Accept": simple_json.CONTENT_TYPE})
    opener = urllib.request.build_opener(_Redirects)
    try:
        with opener.open(request, timeout=_PATIENCE) as answer:
            kind, content = answer.headers.get_content_type(), answer.read(_LIMIT + 1)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return {}
        raise _unreadable(address, f"status {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _unreadable(address, f"{error!r}") from error
    if kind != simple_json.CONTENT_TYPE or len(content) > _LIMIT:
        raise _unreadable(address, f"{len(content):,} bytes of {kind}")
    return parse(content, address)


def read(page: Path) -> dict[str, str]:
    """The same of a page in the folder of an index."""
    if not page.is_file() or page.stat().st_size > _LIMIT:  # a named pipe would be waited for
        raise PackagingError(f"{page}: expected a page of at most {_LIMIT:,} bytes, found none")
    return parse(page.read_bytes(), str(page))


def parse(content: bytes, address: str) -> dict[str, str]:
    """The same of the document that `address` answered."""
    found: dict[str, str] = {}
    try:
        for row in json_text.parse(content, address)["files"]:
            name, digest = row["filename"], row["hashes"]["sha256"].lower()
            if not isinstance(name, str):
                raise ValueError(f"the file name {name!r}")
            if not _SHA256.fullmatch(digest) or found.setdefault(name, digest) != digest:
                raise ValueError(f"not one SHA-256 of {name}")
    except (PackagingError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(address, f"no file list with hashes ({error!r})") from error
    return found


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows an index to addresses that nobody between may answer."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """The request of `newurl`; URLError where others may answer it."""
        if not _is_safe(newurl):
            raise urllib.error.URLError(f"a redirect to {newurl}, which others may answer")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_safe(address: str) -> bool:
    parts = urlsplit(address)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _THIS_MACHINE)


def _check_address(index: str) -> None:
    if _is_safe(index):
        return
    raise ConfigurationError(
        f"--index {index}: expected an https:// address, found another; as https://pypi.org/simple"
    )


def _unreadable(address: str, found: str) -> PackagingError:
    return PackagingError(
        f"{address}: expected the JSON of the simple API ({simple_json.CONTENT_TYPE}), found "
        f"{found}; without it nothing says which files are there: try again, or another index"
    )
