"""Writes a static package index (PEP 503) of the wheels in a folder."""

from __future__ import annotations

import hashlib
import html
import re
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from flashvar.errors import PackagingError


class Entry(NamedTuple):
    """One file of a project's page."""

    file: str
    sha256: str  # hex
    requires_python: str | None


def write(wheels: Path, site: Path) -> list[str]:
    """Copy every wheel of `wheels` into `site`, with its pages; the names of the projects.

    The site is what `pip install --index-url` takes, over HTTP or as a file:// address.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise PackagingError(f"{wheels}: expected wheels, found none; nox -s wheels -- all")
    projects: dict[str, list[Entry]] = defaultdict(list)
    for file in files:
        name = normalized(file.name.split("-")[0])
        folder = site / name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.name)
        projects[name].append(_entry(file))
    for name, entries in projects.items():
        (site / name / "index.html").write_text(page(name, entries), encoding="utf-8")
    (site / "index.html").write_text(root_page(projects), encoding="utf-8")
    return sorted(projects)


def normalized(name: str) -> str:
    """The name of a project as an address spells it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def page(name: str, entries: Iterable[Entry]) -> str:
    """The page of one project."""
    return _document(f"Links for {name}", [_anchor(entry) for entry in entries])


def root_page(names: Iterable[str]) -> str:
    """The page that lists the projects."""
    anchors = (f'<a href="{quote(name)}/">{html.escape(name)}</a>' for name in sorted(names))
    return _document("Simple index", anchors)


def _anchor(entry: Entry) -> str:
    attribute = ""
    if entry.requires_python is not None:
        attribute = f' data-requires-python="{html.escape(entry.requires_python)}"'
    address = f"{quote(entry.file)}#sha256={entry.sha256}"
    return f'<a href="{address}"{attribute}>{html.escape(entry.file)}</a>'


def _document(title: str, anchors: Iterable[str]) -> str:
    lines = "".join(f"    {anchor}<br>\n" for anchor in anchors)
    return f"""\
<!DOCTYPE html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="pypi:repository-version" content="1.0">
    <title>{html.escape(title)}</title>
  </head>
  <body>
    <h1>{html.escape(title)}</h1>
{lines}  </body>
</html>
"""


def _entry(wheel: Path) -> Entry:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (
                name
                for name in archive.namelist()
                if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
            )
            metadata = HeaderParser().parsestr(archive.read(name).decode())
    except (zipfile.BadZipFile, ValueError) as error:
        raise PackagingError(
            f"{wheel}: expected a wheel with one METADATA, found: {error}"
        ) from error
    return Entry(wheel.name, digest, metadata["Requires-Python"])
