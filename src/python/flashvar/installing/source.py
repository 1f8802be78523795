"""Where wheels come from: a folder, a package index, or what pip itself is configured for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from flashvar.binaries import install_commands
from flashvar.errors import WheelNotFoundError

VARIABLE: Final = "FLASHVAR_INDEX"
# A package index has a page of all its projects.
_PAGE: Final = "index.html"


@dataclass(frozen=True)
class WheelSource:
    """A source of wheels; `folder` and `index` are None where the installer decides."""

    folder: Path | None = None
    index: str | None = None

    def __str__(self) -> str:
        """The source as text, without a password."""
        if self.folder is not None:
            return str(self.folder)
        if self.index is None:
            return "the configured package index"
        parts = urlsplit(self.index)
        host = parts.netloc.rpartition("@")[2]
        return parts._replace(netloc=host).geturl()

    @property
    def is_named(self) -> bool:
        """Whether only this source may be asked."""
        return self.folder is not None or self.index is not None


def find(named: str | None, environ: Mapping[str, str], *, extra: str) -> WheelSource:
    """The source of `--from`, else of FLASHVAR_INDEX, else the published release.

    Raises:
        WheelNotFoundError: nothing is named and no release is published, or what is named is not
            there.
    """
    where, text = (VARIABLE, environ.get(VARIABLE)) if named is None else ("--from", named)
    if named == "":  # as of an unset variable: no other source is meant
        raise WheelNotFoundError(
            "--from: expected a folder of wheels or the address of an index, found an empty text: "
            f"name one, or leave --from out for that of {VARIABLE}"
        )
    if not text:
        if install_commands.PUBLISHED:
            return WheelSource()
        raise WheelNotFoundError(
            "expected a folder of wheels or a package index, found none, and no release of "
            "flashvar is published yet: make wheels in a checkout "
            f"(nox -s wheels -- {extra}), then name their folder or an index of them with "
            f"--from or {VARIABLE}"
        )
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise WheelNotFoundError(
            f"{where}: expected the address of an index, found: {error}"
        ) from error
    if parts.scheme in ("http", "https"):
        return WheelSource(index=text)
    try:
        is_address = parts.scheme == "file"
        folder = Path(url2pathname(parts.path)) if is_address else Path(text).expanduser()
        is_index = (folder / _PAGE).is_file()
        if not is_index and any(folder.glob("*.whl")):
            return WheelSource(folder=Path(os.path.realpath(folder)))
        if is_address:  # an index may lack the page of all its projects
            return WheelSource(index=text)
        if is_index:
            return WheelSource(index=Path(os.path.realpath(folder)).as_uri() + "/")
        found = "no wheels in it" if folder.is_dir() else "no such folder"
        found = "a file" if folder.is_file() else found
    except (OSError, RuntimeError) as error:  # RuntimeError: `~` of a user without a home
        found = getattr(error, "strerror", None) or str(error)
    raise WheelNotFoundError(
        f"{where}: expected a folder of wheels or the address of an index, found {found}: {text}"
    )
